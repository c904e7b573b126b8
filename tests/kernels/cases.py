"""The kernels against plain torch in float64: the cases, for the interpreter on the CPU and for a GPU alike."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_dcl import kernels
from torch_dcl.fleet import Inputs, operations
from torch_dcl.fleet.device_data import DeviceData
from torch_dcl.fleet.sgd import Update, sgd_, squared_norms
from torch_dcl.functional import draw_pair

Errors = dict[str, float]
Case = Callable[[str, torch.dtype], Errors]
CASES: dict[str, Case] = {}

SEEDS = torch.tensor([0, 2**63 - 1, 123_456, 2**32 + 5])


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm; infinite where a value is not finite or the shape is another."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    if found.shape != exact.shape:
        return float("inf")
    error = (found - exact).norm() / exact.norm().clamp(min=1e-12)
    return float(error) if error.isfinite() else float("inf")


def compare(operation: Callable[..., Tensor], device: str, dtype: torch.dtype, **inputs: Tensor | None) -> Errors:
    """Output and gradients, by the kernels in `dtype` and by plain torch in float64 from the same numbers."""
    results = []
    incoming = None
    for place, kind in (("cpu", torch.float64), (device, dtype)):
        given = {
            name: x if x is None or not x.is_floating_point() else x.to(dtype).to(place, kind).requires_grad_()
            for name, x in inputs.items()
        }
        given = {name: x.to(place) if x is not None and not x.is_floating_point() else x for name, x in given.items()}
        y = operation(**given)
        incoming = torch.randn(y.shape).to(dtype) if incoming is None else incoming
        leaves = {name: x for name, x in given.items() if x is not None and x.requires_grad}
        gradients = torch.autograd.grad(y, leaves.values(), incoming.to(place, y.dtype))
        results.append({"output": y, **dict(zip(leaves, gradients, strict=True))})
    exact, found = results
    return {name: relative(found[name], exact[name]) for name in exact}


def _used(device: str, dtype: torch.dtype) -> Errors:
    """Plain torch would agree with itself, so make sure that it is not asked."""
    used = kernels.usable(torch.zeros(1, dtype=dtype, device=device))
    return {"kernels that are not used": float(not used), "float64": float(kernels.usable(torch.zeros(1).double()))}


CASES["use"] = _used


# Convolution: C, H, W, N, KH, KW, pool, relu, bias

CONV = {
    "one channel, pooled": (1, 8, 7, 5, 3, 3, 2, True, True),
    "one channel, pooled, sides that leave a rest": (1, 7, 6, 3, 3, 3, 2, False, True),
    "one filter of one value": (1, 5, 3, 1, 1, 1, 1, False, False),
    "no bias": (2, 6, 5, 3, 2, 3, 1, True, False),
    "no relu, not square": (3, 4, 9, 20, 3, 2, 1, False, True),
    "long rows": (7, 7, 8, 6, 3, 5, 1, True, True),
    "long rows, pooled": (7, 8, 9, 6, 3, 5, 2, True, True),
    "long rows, pooled, nothing else": (7, 7, 9, 6, 2, 5, 2, False, False),
    "several chunks and tiles of channels": (70, 4, 5, 4, 2, 3, 1, True, True),
    "several chunks, pooled": (33, 5, 5, 4, 2, 2, 2, True, False),
    "more filters than a tile": (2, 5, 5, 70, 3, 2, 1, True, True),
    "more filters than a tile, pooled": (17, 5, 5, 70, 2, 2, 2, True, True),
    "a sum in several parts": (1, 15, 14, 2, 2, 2, 1, True, True),
}


def _conv_case(C: int, H: int, W: int, N: int, KH: int, KW: int, pool: int, relu: bool, bias: bool) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        E, B = 2, 3
        return compare(
            lambda x, weight, bias: operations.conv(x, weight, bias, pool=pool, relu=relu), device, dtype,
            x=torch.randn(E, B, C, H, W), weight=torch.randn(E, N, C, KH, KW), bias=torch.randn(E, N) if bias else None,
        )  # fmt: skip

    return run


def _conv_cut_off(device: str, dtype: torch.dtype) -> Errors:
    """Every response below zero: nothing comes out and no gradient goes back."""
    return compare(
        lambda x, weight, bias: operations.conv(x, weight, bias, pool=2, relu=True), device, dtype,
        x=torch.rand(2, 2, 1, 5, 5), weight=torch.rand(2, 3, 1, 2, 2), bias=torch.full((2, 3), -50.0),
    )  # fmt: skip


def _conv_not_a_number(device: str, dtype: torch.dtype) -> Errors:
    """A network that has diverged shows it, and the other one does not notice."""
    errors = {}
    for pool in (1, 2):
        x, weight = torch.randn(2, 2, 1, 5, 5), torch.randn(2, 3, 1, 2, 2)
        weight[0] = torch.nan
        y = operations.conv(x.to(device, dtype), weight.to(device, dtype), None, pool=pool, relu=True)
        errors[f"pool {pool}, the diverged one"] = float(not y[0].isnan().all())
        errors[f"pool {pool}, the other one"] = float(not y[1].isfinite().all())
    return errors


CASES |= {f"conv, {name}": _conv_case(*sizes) for name, sizes in CONV.items()}
CASES |= {"conv, cut off by relu": _conv_cut_off, "conv, not a number": _conv_not_a_number}


# Fusion: T, active, bias, what the responses are multiplied by, and what is added to them

FUSE = {
    "two branches": (2, None, True, 1.0, 0.0),
    "two branches without bias": (2, None, False, 1.0, 0.0),
    "two branches, large": (2, None, True, 1e12, 0.0),
    "two branches, small": (2, None, False, 1e-6, 0.0),
    "two branches, most of them dead": (2, None, True, 1.0, -2.0),
    "two branches, all dead": (2, None, True, 1.0, -50.0),
    "three branches": (3, None, True, 1.0, 0.0),
    "three branches without bias": (3, None, False, 1.0, 0.0),
    "three branches, large": (3, None, True, 1e12, 0.0),
    "three branches, most of them dead": (3, None, True, 1.0, -2.0),
    "three branches, all dead": (3, None, False, 1.0, -50.0),
    "a pair of three": (3, [[0, 2], [1, 2], [0, 1]], True, 1.0, 0.0),
    "a pair of three without bias": (3, [[1, 2], [0, 2], [0, 2]], False, 1.0, 0.0),
    "a pair of five, many dead": (5, [[0, 4], [2, 3], [1, 3]], True, 1.0, -1.0),
}


def _fuse_case(T: int, active: list[list[int]] | None, bias: bool, scale: float, shift: float) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        E, B, N = 3, 11, 101
        return compare(
            lambda pre, bias, active: operations.fuse(pre, bias, 10.0**-T, active=active), device, dtype,
            pre=torch.randn(E, T, B, N) * scale + shift, bias=torch.randn(E, T, N) if bias else None,
            active=None if active is None else torch.tensor(active),
        )  # fmt: skip

    return run


CASES |= {f"fusion, {name}": _fuse_case(*sizes) for name, sizes in FUSE.items()}


# Draws


def _dropout_case(shape: tuple[int, ...], p: float, layer: int, step: int) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        x = torch.rand(len(SEEDS), *shape) + 0.5

        def drop(x: Tensor) -> Tensor:
            return operations.dropout(x, SEEDS.to(x.device), layer, torch.tensor([step], device=x.device), p)

        plain, drawn = drop(x.double()), drop(x.to(device, dtype))
        errors = compare(drop, device, dtype, x=x)
        return {**errors, "places dropped by one of the two alone": ((plain == 0) != (drawn.cpu() == 0)).sum().item()}

    return run


DROPOUT = {
    "half": ((3, 500), 0.5, 77, 5),
    "a layer and a step of 32 bits": ((2, 700), 0.25, 4_000_000_000, 2**31 + 3),
    "an odd size": ((1, 3, 31), 0.9, 1, 0),
}
CASES |= {f"dropout, {name}": _dropout_case(*sizes) for name, sizes in DROPOUT.items()}


def _pairs(device: str, dtype: torch.dtype) -> Errors:
    from torch_dcl.fleet.kernels.pointwise import draw_pairs_

    errors = {}
    for T in (3, 4, 5, 8):
        for layer, step in ((0, 0), (77, 5), (4_000_000_000, 2**31 + 3)):
            active = torch.zeros(len(SEEDS), 2, dtype=torch.int64, device=device)
            draw_pairs_(active, SEEDS.to(device), layer, torch.tensor([step], device=device), T)
            key = torch.stack((SEEDS, torch.full_like(SEEDS, layer), torch.full_like(SEEDS, step)), -1)
            errors[f"T = {T}, step {step}"] = (active.cpu() != draw_pair(key, T)).sum().item()
    return errors


CASES["pairs"] = _pairs


# The optimiser


def _sgd_case(
    *, nesterov: bool, clip: bool, hold: bool, factors: tuple[float, float], rates: list[float], low: bool
) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        E, T = 3, 3
        p, m, g = torch.randn(3, E, T * 5, 101).unbind(0)
        g = g.to(dtype)
        results = []
        for place, wide in (("cpu", torch.float64), (device, torch.float32)):
            there = {"device": place, "dtype": wide}
            mine = p.to(**there, copy=True)
            moment = m.to(**there, copy=True)
            operations.keep_low_copy(mine, dtype if low else None)
            active = torch.tensor([[0, 2], [1, 2], [0, 1]], device=place) if hold else None
            alive = torch.ones(E, dtype=torch.bool, device=place)
            sgd_(
                [Update(mine, moment, g.to(place, wide if place == "cpu" else dtype), factors, active, T)],
                torch.tensor(rates, **there), torch.tensor([0.01, 0.02, 0.0], **there),
                torch.tensor([0.5, 1.0, 0.1], **there) if clip else None, 0.9, nesterov, alive,
            )  # fmt: skip
            results.append((mine, moment, alive))
        (exact, exact_moment, _), (mine, moment, alive) = results
        errors = {"weights": relative(mine, exact), "moments": relative(moment, exact_moment)}
        errors["networks that stopped"] = (~alive).sum().item()
        resting = torch.tensor(rates) == 0
        errors["weights at rest that moved"] = (mine.cpu()[resting] != p[resting]).sum().item()
        errors["moments at rest that moved"] = (moment.cpu()[resting] != m[resting]).sum().item()
        if hold:
            idle = mine.cpu().view(E, T, -1)[0, 1]
            errors["weights of idle branches that moved"] = (idle != p.view(E, T, -1)[0, 1]).sum().item()
        if low:
            moved = ~resting
            copy = mine.low.detach().cpu()
            errors["copies that differ"] = (copy[moved] != mine.cpu().to(dtype)[moved]).sum().item()
        return errors

    return run


PLAIN_SGD = {
    "nesterov": False, "clip": False, "hold": False, "factors": (1.0, 1.0), "rates": [0.1, 0.2, 0.3], "low": False,
}  # fmt: skip
SGD = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "clipped": {"clip": True},
    "with factors": {"factors": (2.0, 0.5)},
    "a network at rest": {"rates": [0.1, 0.0, 0.3], "low": True},
    "idle branches": {"hold": True, "low": True},
    "everything": {
        "nesterov": True, "clip": True, "hold": True, "factors": (2.0, 0.0), "rates": [0.1, 0.2, 0.0], "low": True,
    },
}  # fmt: skip
CASES |= {f"sgd, {name}": _sgd_case(**{**PLAIN_SGD, **changes}) for name, changes in SGD.items()}


def _sgd_of_many(device: str, dtype: torch.dtype) -> Errors:
    """More parameters than one launch takes, large and small ones of every kind among each other."""
    sizes = [(6, 700), (1,), (3,), (1024,), (1025,), (2, 3, 5), (2048,)] * 5
    start = [torch.randn(3, 2, *size).unbind(0) for size in sizes]
    found = []
    for place, wide in (("cpu", torch.float64), (device, torch.float32)):
        learning = []
        for i, values in enumerate(start):
            p, m, g = (value.to(place, wide, copy=True) for value in values)
            operations.keep_low_copy(p, dtype if i % 3 else None)
            held = torch.tensor([[0, 2], [1, 0]], device=place) if i % 7 == 0 else None
            learning.append(Update(p, m, g, (1 + i, i % 2), held, 3 if i % 7 == 0 else 1))
        rate, decay = torch.tensor([[0.1, 0.01], [0.01, 0.1]], device=place, dtype=wide)
        sgd_(learning, rate, decay, None, 0.9, True, torch.ones(2, dtype=torch.bool, device=place))
        found.append(learning)
    errors = {}
    for i, (exact, mine) in enumerate(zip(*found, strict=True)):
        errors[f"{i}, {sizes[i]}, weights"] = relative(mine.parameter, exact.parameter)
        errors[f"{i}, {sizes[i]}, moments"] = relative(mine.moment, exact.moment)
        copy = operations.low_copy(mine.parameter)
        if copy is not None:
            errors[f"{i}, {sizes[i]}, copies that differ"] = (copy != mine.parameter.to(dtype)).sum().item()
    return errors


CASES["sgd, many parameters"] = _sgd_of_many


def _sgd_that_overflows(device: str, dtype: torch.dtype) -> Errors:
    """Finite gradients, but a new weight or a new moment that is not: it stays as it was, and its network stops."""
    start = torch.randn(3, 4, 1500)
    start[0, 1, 1100] = start[1, 2, 7] = start[0, 3, 2] = 3.3e38
    start[1, 1, 1100], start[2, 2, 7], start[1, 3, 2] = -3.3e38, 1e38, -3.3e38
    rate = torch.tensor([0.1, 0.1, 0.1, 0.0])  # the last network is not updated, so nothing of it overflows
    p, m, g = (value.to(device, copy=True) for value in start)
    operations.keep_low_copy(p, dtype)
    alive = torch.ones(4, dtype=torch.bool, device=device)
    sgd_([Update(p, m, g)], rate.to(device), torch.zeros(4, device=device), None, 0.9, False, alive)
    new_m = 0.9 * start[1].double() + start[2].double()
    new_p = start[0].double() - rate.double()[:, None] * new_m
    largest = torch.finfo(torch.float32).max
    moves = (rate[:, None] > 0) & (new_p.abs() <= largest) & (new_m.abs() <= largest)
    return {
        "values that overflow": float((~moves[:3]).sum() != 2),
        "weights": relative(p.clamp(-10, 10), torch.where(moves, new_p, start[0]).clamp(-10, 10)),
        "moments": relative(m.clamp(-10, 10), torch.where(moves, new_m, start[1]).clamp(-10, 10)),
        "the weight that overflows": float(p[1, 1100] != start[0, 1, 1100]),
        "the moment that overflows": float(m[2, 7] != start[1, 2, 7]),
        "copies that differ": (operations.low_copy(p) != p.to(dtype)).sum().item(),
        "networks that stopped": float(alive.tolist() != [True, False, False, True]),
    }


CASES["sgd, overflows"] = _sgd_that_overflows


def _squared_norms(device: str, dtype: torch.dtype) -> Errors:
    sizes = [(6, 700), (1,), (4096,), (4097,), (2, 3, 5), (9000,)] * 3
    gradients = [torch.randn(3, *size).to(device, dtype) for size in sizes]
    updates = [Update(gradient.float(), gradient.float(), gradient) for gradient in gradients]
    exact = sum(gradient.double().flatten(1).square().sum(1) for gradient in gradients)
    found = squared_norms(updates, torch.float32)
    errors = {"norms": relative(found, exact)}
    alone = squared_norms([Update(*(value[1:2] for value in update[:3])) for update in updates], torch.float32)
    errors["the norm of a network alone"] = float(alone[0] != found[1])
    for value in (torch.nan, torch.inf):
        for which in (0, 1, 3, 17):
            before = gradients[which][1].view(-1)[-1].clone()
            gradients[which][1].view(-1)[-1] = value
            finite = squared_norms(updates, torch.float32).isfinite()
            errors[f"{value} in gradient {which}"] = float(finite.tolist() != [True, False, True])
            gradients[which][1].view(-1)[-1] = before
    return errors


CASES["sgd, squared norms"] = _squared_norms


# Cross-entropy and images


def _entropy_case(classes: int, scale: float) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        labels = torch.randint(0, classes, (2, 5))
        return compare(
            lambda logits: operations.cross_entropy(logits, labels.to(logits.device)), device, dtype,
            logits=torch.randn(2, 5, classes) * scale,
        )  # fmt: skip

    return run


ENTROPY = {"10 classes": (10, 1.0), "2 classes": (2, 3.0), "1023 classes": (1023, 5.0), "huge logits": (37, 1e4)}
CASES |= {f"cross-entropy, {name}": _entropy_case(*sizes) for name, sizes in ENTROPY.items()}


def _gather_case(shape: tuple[int, ...]) -> Case:
    def run(device: str, dtype: torch.dtype) -> Errors:
        from torch_dcl.fleet.kernels.pointwise import gather_images

        images = torch.randint(0, 256, (2, 9, *shape), dtype=torch.uint8)
        which, index = torch.tensor([1, 0, 1]), torch.randint(0, 9, (3, 4))
        found = gather_images(images.to(device), which.to(device), index.to(device), dtype)
        exact = torch.stack([images[d, i] for d, i in zip(which, index, strict=True)]).double() / 255
        return {"images": relative(found, exact)}

    return run


CASES |= {f"images, {name}": _gather_case(s) for name, s in {"grey": (1, 5, 7), "large": (3, 41, 37)}.items()}


# Inputs: size of the images, whether for training, and what is done with them

GREY, COLOUR = ((0.4,), (0.3,)), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
MEAN = 255 * torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
INPUTS = {
    "cut and mirrored": ((3, 32, 32), True, Inputs(COLOUR, crop=24, flip=True)),
    "cut": ((3, 32, 32), True, Inputs(COLOUR, crop=24)),
    "padded and mirrored": ((3, 32, 32), True, Inputs(COLOUR, pad=4, flip=True)),
    "padded": ((3, 32, 32), True, Inputs(COLOUR, crop=32, pad=4)),
    "grey, padded and mirrored": ((1, 28, 28), True, Inputs(GREY, pad=4, flip=True)),
    "grey, cut": ((1, 7, 9), True, Inputs(None, crop=5)),
    "odd sides, padded as far as it goes": ((3, 9, 11), True, Inputs(COLOUR, crop=7, pad=8, flip=True)),
    "odd sides, padded, not square": ((2, 9, 13), True, Inputs(None, pad=5, flip=True)),
    "mirrored": ((3, 5, 7), True, Inputs(COLOUR, flip=True)),
    "one pixel": ((3, 4, 3), True, Inputs(COLOUR, crop=1, flip=True)),
    "normalised": ((3, 9, 11), True, Inputs(COLOUR)),
    "from the middle": ((3, 32, 29), False, Inputs(COLOUR, crop=24, pad=4, flip=True)),
    "less a mean image": ((3, 32, 32), True, Inputs(MEAN, flip=True)),
    "less a mean image, cut and padded": ((3, 32, 32), True, Inputs(MEAN, crop=24, pad=4, flip=True)),
    "less a mean image, from the middle": ((3, 32, 32), False, Inputs(MEAN, crop=24, flip=True)),
    "for evaluation": ((1, 9, 11), False, Inputs(None, pad=4, flip=True)),
}


def _inputs_case(size: tuple[int, ...], train: bool, inputs: Inputs) -> Case:
    """Networks of which two share their images and two their seed, against plain torch on the same device."""

    def run(device: str, dtype: torch.dtype) -> Errors:
        images = torch.randint(0, 256, (2, 9, *size), dtype=torch.uint8)
        data = {name: (images[d], torch.randint(0, 10, (9,))) for name, d in {"a": 0, "b": 1, "c": 1}.items()}
        on_device = DeviceData(data, ["b", "a", "c", "b"], torch.device(device), inputs, train=train)
        on_device.begin_epoch([5, 2**40, 5, 7], 3)
        # Evaluation shows the same images to all networks.
        index = (torch.randint(0, 9, (4, 6)) if train else torch.tensor([2, 3, 0]).expand(4, -1)).to(device)
        found, labels = on_device.gather(index, dtype)
        augmenter, given = on_device._augmenter, on_device.images[on_device.image_of[:, None], index]
        plain = augmenter.augment(given, index, dtype) if train else augmenter.crop_centre(given, dtype)
        close = torch.isclose(found.float(), plain.float(), rtol=1e-6, atol=1e-6)
        return {
            "kernels that are not used": float(not augmenter.kernel_accepts(on_device.images, dtype)),
            "another form": float((found.shape, found.stride()) != (plain.shape, plain.stride())),
            "another type": float((found.dtype, labels.dtype) != (dtype, torch.int64)),
            "pixels": (~close).sum().item(),
            "labels": (labels != on_device.labels[on_device.label_of, index]).sum().item(),
        }

    return run


CASES |= {f"inputs, {name}": _inputs_case(*how) for name, how in INPUTS.items()}


def _inputs_left_to_torch(device: str, dtype: torch.dtype) -> Errors:
    """Nobody knows what a function does to whole images, and no kernel computes in float64."""
    data = {"one": (torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8), torch.randint(0, 10, (9,)))}
    errors = {}
    for name, how, kind in (("function", lambda x: x.flip(2) / 7, dtype), ("wide", COLOUR, torch.float64)):
        inputs = Inputs(how, crop=5, flip=True)
        both = [DeviceData(data, ["one"], torch.device(place), inputs, train=True) for place in ("cpu", device)]
        for on_device in both:
            on_device.begin_epoch([3], 0)
        plain, found = (r.gather(torch.arange(9, device=r.images.device)[None], kind)[0] for r in both)
        errors[f"{name}, taken"] = float(both[1]._augmenter.kernel_accepts(both[1].images, kind))
        errors[name] = relative(found, plain)
    return errors


CASES["inputs, left to torch"] = _inputs_left_to_torch


def errors_of(name: str, device: str, dtype: torch.dtype) -> Errors:
    """Run one case, always from the same random numbers."""
    torch.manual_seed(0)
    return CASES[name](device, dtype)
