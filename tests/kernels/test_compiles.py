"""The kernels compile for a GPU, also where there is none: Triton's compiler needs the target's name alone.

The interpreter forgives what the compiler does not, such as a sum of signed and unsigned numbers. Here the functions
that launch kernels are called on CPU tensors, and instead of launching, the kernel is compiled for compute capability
9.0 with the types and constants that it was called with.
"""

import importlib.util
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.halves import slow

from torch_dcl.kernels import launcher

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int16: "*i16",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@pytest.fixture
def made():
    """What came out of the compiler, in order."""
    return []


@pytest.fixture
def compiled(monkeypatch, made):
    """Names of the kernels that were compiled instead of launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    names = []

    def run(kernel, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        constants, hints = {}, {}

        def typed(value, path, *, constant=False, fixed=False):
            if isinstance(value, tuple) and not constant:
                return tuple(typed(one, (*path, i)) for i, one in enumerate(value))
            whole = isinstance(value, int) and not fixed
            if constant or value is None or (whole and value == 1):
                constants[path] = value
                return "constexpr"
            if isinstance(value, TensorDescriptor):
                return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
            if isinstance(value, torch.Tensor) or (whole and value % 16 == 0):
                hints[path] = [["tt.divisibility", 16]]
            if isinstance(value, torch.Tensor):
                return TYPES[value.dtype]
            if isinstance(value, float):
                return "fp32"
            return "i32" if -(2**31) <= value < 2**31 else "i64"

        signature = {
            name: typed(given[name], (place,), constant=name in constant, fixed=name in fixed)
            for place, name in enumerate(kernel.arg_names)
        }
        source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
            kernel, signature, constants, hints
        )
        made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))
        assert made[-1].metadata.shared <= 227 * 1024, f"{kernel.fn.__name__} does not fit on the chip"
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return names


@given(st.integers(1, 10**7), st.integers(1, 5000))
def test_sizes_are_those_of_triton(size, block):
    import triton

    assert launcher.cdiv(size, block) == triton.cdiv(size, block)
    assert launcher.next_power_of_2(size) == triton.next_power_of_2(size)


@pytest.mark.parametrize(("T", "pairs"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=str)
def test_the_fusion(compiled, T, pairs, dtype):
    from torch_dcl.kernels import elementwise

    pre = [torch.randn(5, 7).to(dtype) for _ in range(T)]
    elementwise.fuse_forward(pre, 0.01, pairs)
    elementwise.fuse_backward(pre[0], pre, 0.01, pairs)
    assert compiled == ["_fuse_forward", "_fuse_backward"]


def test_images_and_filters_in_cells_of_pixels_and_in_another_type(compiled):
    from torch_dcl.kernels import elementwise

    x = torch.randn(2, 3, 24, 24).bfloat16()
    theta = torch.randn(8, 3, 7, 7).contiguous(memory_format=torch.channels_last)
    cells = elementwise.Cells.of(x, theta, (2, 2), (3, 3), (1, 1))
    cells.images(x)
    cells.pixels(cells.filters(theta, torch.bfloat16), theta, torch.float32)
    elementwise.cast(torch.randn(3, 5), torch.bfloat16)
    assert compiled == ["_image_cells", "_filter_cells", "_filter_cells", "_cast"]


# Three branches are never inside of one kernel, so small sizes are alike.
@pytest.mark.parametrize(
    ("T", "P", "M", "K2", "dtype"),
    [
        (2, 64, 16, 64, torch.bfloat16),
        (2, 64, 128, 512, torch.bfloat16),
        *(slow(T, 1, 1, 1, torch.bfloat16) for T in (2, 3)),
        slow(2, 64, 64, 256, torch.bfloat16),
        slow(3, 64, 128, 512, torch.bfloat16),
        *(slow(T, 64, 256, 1024, torch.bfloat16) for T in (2, 3)),
        *(slow(T, 64, 128, 512, torch.float32) for T in (2, 3)),
    ],
    ids=str,
)
def test_the_projection(compiled, T, P, M, K2, dtype):
    from torch_dcl.kernels import project

    y, weight, bias = (torch.randn(shape).to(dtype) for shape in ((P, T * M), (T * M, K2), (T, K2)))
    projection = project.Projection(P, M, T, K2, dtype, y.device, 0.01, T == 3, dtype, 0, True)
    projection(y, weight, bias, torch.empty(P, K2, dtype=dtype))
    projection.gradients(torch.randn(P, K2).to(dtype), y, weight, bias, torch.float32)
    inside = T == 2 and M <= 128 and dtype == torch.bfloat16
    apart = inside and M <= 64 and not (M <= 16 and K2 <= 64)  # where a program has not all outputs
    assert compiled == [
        "forward", "backward", *(["backward_rows"] if apart else []), *(["sum_partials_"] if inside else [])
    ]  # fmt: skip


@pytest.mark.parametrize("M", [slow(16), 32])
@pytest.mark.parametrize("weights", [slow(torch.bfloat16), torch.float32], ids=str)
def test_the_projection_of_few_filters_on_hopper_gpus(compiled, M, weights):
    from torch_dcl.kernels import hopper

    y, z = torch.randn(100, 2 * M).bfloat16(), torch.empty(100, 192).bfloat16()
    hopper.project_forward(y, torch.randn(2 * M, 192, dtype=weights), torch.randn(2, 192), z, 0.01)
    assert compiled == ["_forward", "forward"]


@pytest.mark.parametrize(
    ("M", "bias", "gradients"),
    [
        (128, True, torch.float32), slow(128, False, torch.bfloat16), slow(64, True, torch.bfloat16),
        slow(64, False, torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_the_projection_on_hopper_gpus(compiled, M, bias, gradients):
    from torch_dcl.kernels import hopper

    y, weight, biases = (torch.randn(shape).bfloat16() for shape in ((100, 2 * M), (2 * M, 192), (2, 192)))
    grad = torch.randn(100, 192).bfloat16()
    hopper.project_forward(y, weight, biases if bias else None, torch.empty_like(grad), 0.01)
    hopper.project_backward(grad, y, weight, biases if bias else None, 0.01, gradients)
    rows = ["backward_rows"] if M == 64 else []
    assert compiled == ["_forward", "forward", "_backward", "backward", *rows, "sum_partials_"]


@pytest.mark.parametrize("T", [2, 3])
@pytest.mark.parametrize("P", [slow(1), 32, slow(256), 1024])
def test_the_projection_of_few_positions_that_keeps_its_responses(compiled, T, P):
    from torch_dcl.kernels import saved_responses

    y, weight, bias = (torch.randn(shape).bfloat16() for shape in ((P, T * 256), (T * 256, 512), (T, 512)))
    z = torch.empty(P, 512).bfloat16()
    pre = saved_responses.forward(y, weight, bias, z, T, 0.01, False)
    saved_responses.backward(z, y, weight, bias, pre, T, 0.01, False, torch.float32)
    saved_responses.backward(z, y, weight, None, pre, T, 0.01, False, torch.bfloat16)
    forward = ["_saved_forward" if P <= 128 or (T == 2 and P <= 512) else "_fuse_forward"]
    backward = ["_fuse_backward", *(["_saved_backward"] if P <= 512 else [])]
    assert compiled == [*forward, *backward, *backward]


@pytest.mark.parametrize(
    ("P", "K2", "T", "keep"),
    [
        *((100, 1024, T, keep) for T in (2, 3) for keep in (True, False)),
        slow(64, 512, 2, False), slow(64, 512, 3, True), slow(64, 4096, 2, True), slow(64, 4096, 3, False),
        slow(128, 4096, 2, False), slow(128, 4096, 3, True), slow(400, 1024, 2, True), slow(400, 1024, 3, True),
        slow(400, 1024, 3, False), slow(400, 4096, 2, True), slow(400, 4096, 3, False),
    ],
)  # fmt: skip
def test_float32_weights_are_rounded_by_the_kernel_that_reads_them(compiled, T, keep, P, K2):
    """As under autocast, in the sizes of AlexNet's and VGG's layers: twice the bytes must fit on the chip, too."""
    from torch_dcl.kernels import plans, saved_responses

    y, weight, M = torch.randn(P, T * 64).bfloat16(), torch.randn(T * 64, K2), 64
    plan = plans.Plan(
        y.shape, y.stride(), y.dtype, y.device, K2, weight.dtype, None, 1, T, 0.01, False, keep, None, True
    )
    low = plan.forward(y, weight, None, None)[1][0]
    assert (plan.M, low.dtype, low.shape) == (M, torch.bfloat16, weight.shape)
    assert plan.forward(y, weight, None, None, learns=False)[1][0] is None or (keep and P > 128 and T == 3)
    kernel = (
        ("_saved_forward" if saved_responses.uses_one_kernel(P, T, y.dtype) else "_fuse_forward") if keep else "forward"
    )
    assert compiled == [kernel, kernel]


@pytest.mark.parametrize(
    ("channels", "filters", "side", "kernel"), [slow(1, 20, 28, 5), (20, 50, 12, 5), slow(64, 130, 6, 3)]
)
@pytest.mark.parametrize("pool", [slow(1), 2])
def test_the_convolution(compiled, channels, filters, side, kernel, pool):
    from torch_dcl.fleet.kernels import conv

    x = torch.randn(2, 3, side, side, channels).bfloat16()
    packed = conv.pack_weight(torch.randn(2, filters, channels, kernel, kernel).bfloat16())
    bias = torch.randn(2, filters).bfloat16()
    out, which = conv.conv_forward(x, packed, bias, filters, pool=pool, relu=True)
    conv.conv_backward_weight(x, out, which, (kernel, kernel), pool=pool)
    conv.conv_backward_input(packed, out, which, tuple(x.shape), pool=pool)
    assert compiled[1:] == ["_weight_gradient", "_unpool", "_input_gradient"]


# Every type with every width, and every window with each of these.
@pytest.mark.parametrize(
    ("channels", "dtype", "size", "beta"),
    [
        (3, torch.bfloat16, 5, 0.75), (256, torch.bfloat16, 5, 0.75),
        *(slow(channels, torch.bfloat16, 7, 0.5) for channels in (1, 96, 100)),
        *(slow(channels, torch.float16, 5, 0.75) for channels in (1, 96, 100)),
        *(slow(channels, torch.float16, 7, 0.5) for channels in (3, 256)),
        *(slow(channels, torch.float32, 5, 0.75) for channels in (1, 3, 96)),
        *(slow(channels, torch.float32, 7, 0.5) for channels in (100, 256)),
    ],
    ids=str,
)  # fmt: skip
def test_the_response_norm(compiled, dtype, channels, size, beta):
    from torch_dcl.models import _response_norm_kernels as response_norm

    x = torch.randn(2, channels, 4, 4).to(dtype).to(memory_format=torch.channels_last)
    response_norm.norm_forward(x, size, 1e-4, beta, 1.0)
    response_norm.norm_backward(x, x, size, 1e-4, beta, 1.0)
    assert compiled == ["_norm_forward", "_norm_backward"]


@pytest.mark.parametrize("channels", [slow(96), 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=str)
def test_the_response_norm_moves_16_bytes_at_once_and_exchanges_nothing(compiled, made, dtype, channels):
    from torch_dcl.models import _response_norm_kernels as response_norm

    x = torch.randn(2, channels, 4, 4).to(dtype).to(memory_format=torch.channels_last)
    response_norm.norm_forward(x, 5, 1e-4, 0.75, 1.0)
    response_norm.norm_backward(x, x, 5, 1e-4, 0.75, 1.0)
    for kernel in made:
        moves = re.findall(r"(ld|st)\.global\S*?(v4)?\.b(32|16)", kernel.asm["ptx"])
        assert {wide for _, wide, _ in moves} == {"v4"}
        assert [which for which, *_ in moves].count("st") == 1
        assert kernel.metadata.shared == 0


@pytest.mark.parametrize("shape", [(2, 128, 28, 28), (2, 3, 31, 33), (5, 1000, 2), (1, 2, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=str)
def test_another_layout(compiled, made, dtype, shape):
    from torch_dcl.kernels import elementwise

    x = torch.randn(shape)
    last = elementwise.transpose(x, 1, True, dtype)
    elementwise.transpose(last, 1, False, torch.float32)
    assert compiled == ["_transpose", "_transpose"]
    if shape[1] % 64 == 0:  # both ways along the memory, 16 bytes at once
        for kernel in made:
            assert "v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize(("positions", "bits"), [(2**20, 32), (2**21, 64)])
def test_places_beyond_the_range_of_32_bits(compiled, made, positions, bits):
    from torch_dcl.kernels import pointwise

    pre, out = torch.zeros(1).expand(1, 2, positions, 1024), torch.zeros(1).expand(1, positions, 1024)
    pointwise.fuse_forward(pre, None, 0.01, out=out)
    assert compiled == ["_fuse_forward"]
    places = re.search(r"get_program_id x.*?arith\.muli [^:]*: i(\d+)", made[0].asm["ttir"], re.DOTALL)
    assert int(places[1]) == bits


@pytest.mark.parametrize("E", [slow(1), 3])
def test_what_stands_between_products(compiled, E):
    from torch_dcl.fleet.kernels import pointwise
    from torch_dcl.kernels.pointwise import fuse_backward, fuse_forward

    active, seed, step = torch.zeros(E, 2, dtype=torch.int64), torch.zeros(E, dtype=torch.int64), torch.zeros(1).long()
    pre, bias = torch.randn(E, 3, 4, 9).bfloat16(), torch.randn(E, 3, 9).bfloat16()
    for pair in (None, active):
        z = fuse_forward(pre, bias, 0.01, pair)
        fuse_backward(z, pre, bias, 0.01, pair)
    pointwise.dropout(z, seed, 4_000_000_000, step, 0.5)
    pointwise.dropout(z, seed, 1, step, 0.5)
    pointwise.draw_pairs_(active, seed, 1, step, 3)
    pointwise.gather_images(torch.zeros(2, 5, 1, 6, 6, dtype=torch.uint8), seed, seed[:, None], torch.bfloat16)
    logits, labels = torch.randn(4, 11).bfloat16(), torch.zeros(4, dtype=torch.int64)
    losses, lse = pointwise.entropy_forward(logits, labels)
    pointwise.entropy_backward(losses, logits, labels, lse)
    assert len(compiled) == 10


@pytest.mark.parametrize(
    ("T", "M", "N", "bias", "affine", "fixed"),
    [
        (2, 16, 64, False, True, False), (2, 128, 512, False, True, False),
        slow(2, 1, 1, True, True, False), slow(3, 20, 65, True, False, False), slow(2, 256, 1024, False, True, False),
        slow(3, 256, 512, False, True, False), slow(2, 16, 64, False, True, True), slow(3, 20, 65, True, False, True),
        slow(2, 256, 1024, False, True, True),
    ],
)  # fmt: skip
def test_norms(compiled, T, M, N, bias, affine, fixed):
    from torch_dcl.kernels import plans
    from torch_dcl.kernels.launch import Norm

    def numbers():
        return torch.rand(T * N)

    count = torch.zeros((), dtype=torch.int64)
    scales = (numbers(), numbers()) if affine else (None, None)
    norm = Norm(*scales, numbers(), numbers(), count, 1e-5, 0.1, fixed)
    y, weight, grad = torch.randn(100, T * M).bfloat16(), torch.randn(T * M, N), torch.randn(100, N).bfloat16()
    biases = torch.randn(T, N) if bias else None
    plan = plans.plan_for(y, weight, biases, 1, T, 0.01, False, False, norm)
    z, known = plan.forward(y, weight, biases, norm)
    plan.backward(grad, y, biases, known, torch.float32)
    assert z.shape == (100, N)
    first = ["_fixed"] if fixed else ["_moments", "_wide_statistics" if M > 128 else "_statistics"]
    last = ["backward_rows"] if T == 3 or N > 64 else [] if fixed else ["add_statistics_gradient_"]
    assert compiled == [*first, "forward", "backward", "_gradients", *last]


@pytest.mark.parametrize(
    ("T", "M", "N", "bias", "affine", "track"),
    [(2, 16, 64, False, True, True), slow(2, 128, 512, False, True, True), slow(3, 20, 65, True, False, False)],
)
def test_norms_of_several_processes(compiled, monkeypatch, T, M, N, bias, affine, track):
    from torch import distributed

    from torch_dcl.kernels import plans
    from torch_dcl.kernels.launch import Norm

    monkeypatch.setattr(distributed, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(distributed, "all_gather_into_tensor", lambda *_: None)
    monkeypatch.setattr(distributed, "all_reduce", lambda *_, **__: None)
    scales = (torch.rand(T * N), torch.rand(T * N)) if affine else (None, None)
    running = (torch.rand(T * N), torch.rand(T * N), torch.zeros((), dtype=torch.int64)) if track else (None,) * 3
    norm = Norm(*scales, *running, 1e-5, 0.1, False, 8, "group")
    weight, biases = torch.randn(T * M, N), torch.randn(T, N) if bias else None
    for P in (100, 0):
        y, grad = torch.randn(P, T * M).bfloat16(), torch.randn(P, N).bfloat16()
        plan = plans.plan_for(y, weight, biases, 1, T, 0.01, False, False, norm)
        z, known = plan.forward(y, weight, biases, norm)
        plan.backward(grad, y, biases, known, torch.bfloat16, norm.group)
        assert z.shape == (P, N)
    last = ["backward_rows"] if T == 3 or N > 64 else ["add_statistics_gradient_"]
    whole = ["_moments", "_statistics", "_combine", "forward", "backward", "_gradients", "_complete", *last]
    assert compiled == [*whole, "_combine", "_gradients", "_complete"]


@pytest.mark.parametrize("clipped", [True, slow(False)])
@pytest.mark.parametrize("E", [slow(1), 3])
def test_the_optimiser(compiled, E, clipped):
    from torch_dcl.fleet.kernels import sgd

    active, rates = torch.zeros(E, 2, dtype=torch.int64), torch.ones(E)
    parameters = [torch.randn(E, 6, 5), torch.randn(E, 1), *torch.randn(20, E, 3)]
    sgd.sgd_(
        parameters, parameters, [p.bfloat16() for p in parameters],
        [p.bfloat16() if i % 2 else None for i, p in enumerate(parameters)],
        [1.0, 2.0] * 11, [0.0, 1.0] * 11, [active, *[None] * 21], [3, *[1] * 21],
        lr=rates, weight_decay=rates, clip=rates if clipped else None, momentum=0.9, nesterov=clipped,
        alive=rates > 0,
    )  # fmt: skip
    assert compiled == ["_sgd", "_sgd"]
    compiled.clear()
    sgd.squared_norms([p.bfloat16() if i % 2 else p for i, p in enumerate(parameters)])
    assert compiled == ["_partial_squares", "_partial_squares", "_sum_rows"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=str)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(("E", "size", "crop"), [(3, (3, 32, 32), (24, 24)), (1, (1, 9, 7), (9, 7))], ids=str)
def test_images_as_inputs(compiled, made, E, size, crop, drawn, dtype):
    from torch_dcl.fleet.kernels import augmentation

    images, labels = torch.zeros(2, 5, *size, dtype=torch.uint8), torch.zeros(2, 5, dtype=torch.int64)
    which, index = torch.zeros(E, dtype=torch.int64), torch.zeros(E, 4, dtype=torch.int64)
    first = torch.zeros(2, E, 5, dtype=torch.int16) if drawn else None
    mirrored = torch.zeros(E, 5, dtype=torch.bool) if drawn else None
    scale, shift = torch.ones(2, size[0])
    for mean in (None, torch.zeros(size)):
        found, theirs = augmentation.gather_inputs(
            images, which, labels, which, index, first, mirrored, scale, shift, mean, crop, dtype
        )
        assert (found.shape, found.dtype) == ((E, 4, size[0], *crop), dtype)
        assert (theirs.shape, theirs.dtype) == ((E, 4), torch.int64)
    assert compiled == ["_gather_inputs", "_gather_inputs"]
    assert "fma.rn.f32" in made[0].asm["ptx"]
