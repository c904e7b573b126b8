"""What a person expects of torch's own transformers: after conversion eval gives what the DCL layers compute."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_dcl as dcl

D, FEEDFORWARD, LENGTHS = 32, 192, (5, 3, 1)


def encoder_layer(**arguments):
    return nn.TransformerEncoderLayer(D, 4, FEEDFORWARD, **{"batch_first": True, **arguments})


class Classifier(nn.Module):
    """An encoder behind an embedding, told by a mask where each sentence ends."""

    def __init__(self, padded=True, layers=2, **arguments):
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.encoder = nn.TransformerEncoder(encoder_layer(**arguments), layers)
        self.head = nn.Linear(D, 3)
        self.padded = padded

    def forward(self, tokens):
        padding = tokens == 0 if self.padded else None
        y = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.head(y.masked_fill((tokens == 0)[..., None], 0).sum(1))


def tokens():
    made = torch.randint(1, 11, (len(LENGTHS), max(LENGTHS)))
    for row, length in zip(made, LENGTHS, strict=True):
        row[length:] = 0
    return made


def source():
    return torch.randn(3, 5, D)


NETWORKS = {
    "layer": (encoder_layer, lambda: (source(),)),
    "layer with norm first": (lambda: encoder_layer(norm_first=True), lambda: (source(),)),
    "layer with a ReLU module": (lambda: encoder_layer(activation=nn.ReLU()), lambda: (source(),)),
    "encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), lambda: (source(),)),
    "encoder with padding": (Classifier, lambda: (tokens(),)),
    "encoder without padding": (lambda: Classifier(padded=False), lambda: (tokens(),)),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, FEEDFORWARD, batch_first=True), 2),
        lambda: (source(), source()),
    ),
    "transformer": (
        lambda: nn.Transformer(D, 4, 2, 2, FEEDFORWARD, batch_first=True),
        lambda: (source(), source()),
    ),
}


@pytest.fixture(autouse=True)
def _dcl_layers_have_a_weight(monkeypatch):
    """As the fused path would find it, of the shape that it needs, if it looked."""

    def theta(layer):
        return torch.full((FEEDFORWARD, D), torch.nan)

    monkeypatch.setattr(dcl.DCLLinear, "weight", property(theta), raising=False)
    monkeypatch.setattr(dcl.DCLLinear, "bias", property(lambda _: torch.zeros(FEEDFORWARD)), raising=False)


def converted(model, example):
    plan = dcl.plan(model, example=example, branches=2, width=8)
    names = [row.name for row in plan.selected]
    assert names
    assert all(name.endswith("linear1") for name in names)
    dcl.convert_(model, plan, init="random")
    return model


@torch.no_grad()
def slowly(model, example):
    """The reference: torch told to call every module."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model.eval()(*example)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_converted_transformer_infers_what_its_layers_compute(name, tmp_path):
    make, inputs = NETWORKS[name]
    model, example = make(), inputs()
    torch.testing.assert_close(model.eval()(*example), slowly(model, example))
    converted(model.train(), example)
    model(*example).sum().backward()
    expected = slowly(model, example)
    assert expected.isfinite().all()
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(make, tmp_path / "m.safetensors")
    for each in (model, copy.deepcopy(model), loaded):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(each.eval()(*example), expected)


def test_padded_sentences_calibrate_a_fit_and_recover_it():
    teacher, sentences = Classifier(layers=1).eval(), tokens()
    model = copy.deepcopy(teacher)
    dcl.convert_(model, dcl.plan(model, example=sentences, width=8), init="fit", calibration=[sentences])
    found, wanted = slowly(model, (sentences,)), slowly(teacher, (sentences,))
    done = dcl.recover_(model, teacher, [sentences], epochs=1, progress=False)
    error = (found - wanted).square().sum() / wanted.square().sum()
    assert done.errors == pytest.approx([error.item()], rel=1e-4)


def test_only_the_parents_of_converted_layers_leave_the_fused_path(tmp_path):
    model = nn.ModuleList([encoder_layer(), encoder_layer()])
    model.forward = lambda x: model[1](model[0](x))
    plan = dcl.plan(model, example=source(), width=8).only("0.linear1")
    dcl.convert_(model, plan, init="random")
    assert [layer.activation_relu_or_gelu for layer in model] == [0, 1]


def test_an_encoder_made_of_a_converted_layer_calls_it():
    layer = converted(encoder_layer(), (source(),))
    with pytest.warns(UserWarning, match="activation_relu_or_gelu was not True"):
        model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = source(), torch.arange(5) >= torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding).isfinite().all()


def test_a_transformer_without_a_converted_layer_keeps_the_fused_path():
    model = Classifier(activation=F.gelu)
    plan = dcl.plan(model, example=tokens())
    assert plan.selected == ()
    dcl.convert_(model, plan, init="random")
    assert model.encoder.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in model.encoder.layers] == [2, 2]


def test_the_output_projection_of_attention_is_refused():
    model = encoder_layer()
    plan = dcl.plan(model, example=source())
    with pytest.raises(ValueError, match=r"'self_attn.out_proj' cannot be converted: its weight is used functionally"):
        plan.only("self_attn.out_proj")
