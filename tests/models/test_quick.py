import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torch_dcl.fleet.stacked_network import Stack
from torch_dcl.models._quick import QuickConv2d, QuickResponseNorm, conv_of_cells

# Kernel, stride, and what the image has more.
sides = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 20))


@given(sides, sides, st.integers(1, 4), st.booleans(), st.booleans())
def test_a_convolution_of_cells_is_the_convolution(rows, columns, channels, biased, last):
    (kh, sh, more_h), (kw, sw, more_w) = rows, columns
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, channels, kh + more_h, kw + more_w), (3, channels, kh, kw), (3,))
    )
    images = x.to(memory_format=torch.channels_last) if last else x
    own = bias if biased else None
    results = [conv_of_cells(images, weight, own, (sh, sw)), F.conv2d(images, weight, own, (sh, sw))]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    g = torch.randn(results[0].shape, generator=generator, dtype=torch.float64)
    found, exact = (torch.autograd.grad(y, (x, weight, *((bias,) if biased else ())), g) for y in results)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_cells_are_channels_last_for_cudnn():
    x, weight = torch.randn(2, 3, 27, 27).to(memory_format=torch.channels_last), torch.randn(8, 3, 11, 11)
    y = conv_of_cells(x, weight, None, (4, 4))
    assert y.shape == (2, 8, 5, 5)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_they_are_stacked_like_the_layers_of_torch():
    networks = [nn.Sequential(QuickConv2d(3, 4, 5, stride=2), QuickResponseNorm(3, alpha=0.1)) for _ in range(2)]
    x = torch.randn(2, 5, 3, 9, 9)
    torch.testing.assert_close(Stack(networks)(x), torch.stack([n(own) for n, own in zip(networks, x, strict=True)]))


@pytest.mark.parametrize("layer", [QuickConv2d(3, 4, 5, stride=2), QuickResponseNorm(3)], ids=str)
def test_torch_fx_and_export_see_a_layer_of_torch(layer):
    model, x = nn.Sequential(layer), torch.randn(2, 3, 9, 9)
    assert [node.op for node in torch.fx.symbolic_trace(model).graph.nodes] == ["placeholder", "call_module", "output"]
    program = torch.export.export(model, (x,))
    assert not any("torch_dcl" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
