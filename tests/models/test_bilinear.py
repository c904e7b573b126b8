import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl.layers import DCLConv2d, DCLLinear
from torch_dcl.models import BilinearFusion, BilinearPool, count_weights


def bilinear_form(U: Tensor, y1: Tensor, y2: Tensor) -> Tensor:
    """The definition: a loop over outputs and positions, one outer product at a time."""
    n, positions = y1.shape[0], y1.shape[2:]
    a, b = y1.reshape(n, y1.shape[1], -1), y2.reshape(n, y2.shape[1], -1)
    z = torch.empty(n, U.shape[0], a.shape[2], dtype=y1.dtype)
    for i in range(n):
        for p in range(a.shape[2]):
            outer = torch.outer(a[i, :, p], b[i, :, p])
            z[i, :, p] = torch.stack([(U[k] * outer).sum() for k in range(U.shape[0])])
    return z.reshape(n, U.shape[0], *positions)


# The three orders of summation: by the outer product, by U with the second input, by U with the first.
SIZES = [(3, 4, 9), (3, 7, 2), (7, 3, 2), (1, 1, 1), (5, 5, 5), (1, 6, 4)]


@pytest.mark.parametrize(("m1", "m2", "out"), SIZES)
@pytest.mark.parametrize("positions", [(), (5,), (2, 3), (2, 1, 3)])
def test_agrees_with_the_definition(m1: int, m2: int, out: int, positions: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = BilinearFusion(m1, m2, out).double()
    y1 = torch.randn(2, m1, *positions, dtype=torch.float64)
    y2 = torch.randn(2, m2, *positions, dtype=torch.float64)
    z = layer(y1, y2)
    assert z.shape == (2, out, *positions)
    torch.testing.assert_close(z, bilinear_form(layer.weight.detach(), y1, y2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("m1", "m2", "out"), SIZES[:3])
def test_gradients(m1: int, m2: int, out: int) -> None:
    layer = BilinearFusion(m1, m2, out).double()
    y1 = torch.randn(2, m1, 2, dtype=torch.float64, requires_grad=True)
    y2 = torch.randn(2, m2, 2, dtype=torch.float64, requires_grad=True)

    def run(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (a, b))

    assert torch.autograd.gradcheck(run, (y1, y2, layer.weight))


@pytest.mark.parametrize(("m1", "m2", "out"), SIZES[:3])
def test_a_separable_weight_gives_the_product_of_two_linear_maps(m1: int, m2: int, out: int) -> None:
    torch.manual_seed(0)
    W1, W2 = torch.randn(out, m1, dtype=torch.float64), torch.randn(out, m2, dtype=torch.float64)
    y1 = torch.randn(2, m1, 3, 3, dtype=torch.float64)
    y2 = torch.randn(2, m2, 3, 3, dtype=torch.float64)
    layer = BilinearFusion(m1, m2, out).double()
    with torch.no_grad():
        layer.weight.copy_(torch.einsum("ki,kj->kij", W1, W2))
    v1, v2 = (F.conv2d(y, W[:, :, None, None]) for y, W in ((y1, W1), (y2, W2)))
    torch.testing.assert_close(layer(y1, y2), v1 * v2, rtol=1e-11, atol=1e-11)


def test_is_dcl_with_two_branches_up_to_the_root() -> None:
    """Section 3.3: with U = W1 ⊗ W2 and positive responses, z² − ε of DCL is the bilinear form."""
    torch.manual_seed(0)
    K1, K2, u, M1, M2, eps = 3, 6, 3, 4, 5, 1e-2
    x = torch.rand(2, K1, 7, 7, dtype=torch.float64)
    theta1, theta2 = (torch.rand(m, K1, u, u, dtype=torch.float64) for m in (M1, M2))
    W1, W2 = (torch.rand(K2, m, dtype=torch.float64) for m in (M1, M2))
    y1, y2 = F.conv2d(x, theta1), F.conv2d(x, theta2)
    v1, v2 = (F.relu(F.conv2d(y, W[:, :, None, None])) for y, W in ((y1, W1), (y2, W2)))
    z = (v1 * v2 + eps).sqrt()

    layer = BilinearFusion(M1, M2, K2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.einsum("ki,kj->kij", W1, W2))
    torch.testing.assert_close(z.square() - eps, layer(y1, y2), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("widths", [(4, 4), (4, 5)])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_is_the_dcl_layer_up_to_the_root(kind: str, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    shape = (5, 3) if kind == "linear" else (2, 3, 7, 7)
    x = torch.rand(shape, dtype=torch.float64)
    if kind == "linear":
        dcl = DCLLinear(3, 6, width=widths, bias=False, dtype=torch.float64)
    else:
        dcl = DCLConv2d(3, 6, 3, padding=1, width=widths, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for parameter in dcl.parameters():
            parameter.uniform_(0.1, 1)  # positive weights on positive images: every response is positive
    y, v, z = dcl.responses(x)
    assert all((response > 0).all() for response in v)

    W1, W2 = dcl.fusion.weight.detach().split(widths)
    bilinear = BilinearFusion(*widths, 6).double()
    with torch.no_grad():
        bilinear.weight.copy_(torch.einsum("ik,jk->kij", W1, W2))
    torch.testing.assert_close(z.square() - dcl.eps, bilinear(*y), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(dcl(x).square() - 1e-2, bilinear(*y), rtol=1e-11, atol=1e-11)


def test_weights_beside_those_of_dcl() -> None:
    """Each output needs m1 · m2 weights here and m1 + m2 in DCL."""
    assert count_weights(BilinearFusion(16, 24, 10)) == 16 * 24 * 10


def test_start_keeps_the_variance() -> None:
    torch.manual_seed(0)
    layer = BilinearFusion(24, 40, 64)
    z = layer(torch.randn(4096, 24), torch.randn(4096, 40))
    assert z.var().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    layer = BilinearFusion(3, 4, 9)
    with torch.no_grad():
        layer.weight.fill_(1e-3)
    # Each product is 90,000, beyond float16; the sum of twelve of them times 0.001 is not.
    y1, y2 = torch.full((2, 3), 300.0, dtype=dtype), torch.full((2, 4), 300.0, dtype=dtype)
    z = layer(y1, y2)
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), torch.full((2, 9), 1080.0), rtol=1e-2, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = layer(torch.full((2, 3), 300.0), torch.full((2, 4), 300.0))
    torch.testing.assert_close(exact, torch.full((2, 9), 1080.0), rtol=1e-5, atol=0)


def test_pool_agrees_with_lin_et_al() -> None:
    torch.manual_seed(0)
    y1 = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    y2 = torch.randn(3, 6, 5, 2, dtype=torch.float64)
    descriptor = BilinearPool()(y1, y2)
    assert descriptor.shape == (3, 24)
    for i in range(3):
        z = torch.zeros(4, 6, dtype=torch.float64)
        for row in range(5):
            for column in range(2):
                z += torch.outer(y1[i, :, row, column], y2[i, :, row, column]) / 10
        z = torch.tensor([math.copysign(math.sqrt(abs(v) + 1e-5), v) for v in z.flatten().tolist()]).double()
        torch.testing.assert_close(descriptor[i], z / z.square().sum().sqrt(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(descriptor.norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_pool_takes_inputs_without_positions_and_zeros() -> None:
    pool = BilinearPool()
    y1 = torch.zeros(2, 3, requires_grad=True)
    descriptor = pool(y1, torch.zeros(2, 4))
    descriptor.sum().backward()
    assert torch.equal(descriptor, torch.zeros(2, 12))
    assert y1.grad is not None
    assert torch.isfinite(y1.grad).all()
    assert not list(pool.parameters())


def test_pool_computes_half_types_in_float32() -> None:
    y = torch.full((1, 2, 50, 50), 200.0, dtype=torch.float16)
    torch.testing.assert_close(BilinearPool()(y, y), torch.full((1, 4), 0.5, dtype=torch.float16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert BilinearPool()(y.float(), y.float()).dtype == torch.float32


@pytest.mark.parametrize("layer", [BilinearFusion(3, 4, 9), BilinearFusion(3, 4, 1), BilinearPool()])
def test_compiles_and_exports(layer: torch.nn.Module) -> None:
    torch.compiler.reset()
    inputs = torch.randn(2, 3, 5, 5), torch.randn(2, 4, 5, 5)
    expected = layer(*inputs)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(*inputs), expected)
    torch.testing.assert_close(torch.export.export(layer, inputs).module()(*inputs), expected)


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer = BilinearFusion(3, 4, 9)
    with pytest.raises(ValueError, match=r"inputs have 4 and 3 channels, .* BilinearFusion\(4, 3, 9\)"):
        layer(torch.zeros(2, 4, 5), torch.zeros(2, 3, 5))
    for y1, y2 in (((2, 3, 5), (2, 4, 6)), ((2, 3, 5), (1, 4, 5)), ((2, 3), (2, 4, 1)), ((3,), (4,))):
        for module in (layer, BilinearPool()):
            with pytest.raises(ValueError, match="same N and positions, got") as error:
                module(torch.zeros(y1), torch.zeros(y2))
            assert f"{y1} and {y2}" in str(error.value)


@pytest.mark.parametrize(("sizes", "name"), [((0, 4, 9), "m1"), ((3, -1, 9), "m2"), ((3, 4, 0), "out")])
def test_bad_sizes_are_refused(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
        BilinearFusion(*sizes)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.inf, math.nan])
def test_bad_eps_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be a finite positive number, got"):
        BilinearPool(eps)


def test_sizes_are_printed() -> None:
    assert repr(BilinearFusion(3, 4, 9)) == "BilinearFusion(m1=3, m2=4, out=9)"
    assert repr(BilinearPool()) == "BilinearPool(eps=1e-05)"
