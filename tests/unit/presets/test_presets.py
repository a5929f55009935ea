"""Presets have the parameters that their papers count, compute, and can be planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import InputError
from autopar.presets import PRESETS, DecoderConfig, build, build_decoder, find
from autopar.runtime.loader import load_model

DECODERS = [name for name, preset in PRESETS.items() if preset.family == "decoder"]
OTHERS = [name for name in PRESETS if name not in DECODERS]
TINY = DecoderConfig(layers=2, hidden=16, heads=4, vocab=29, context=8)
KINDS = {
    "gpt": TINY,
    "mpt": replace(TINY, positions="alibi", bias=False, qkv_bias=False),
    "llama": replace(
        TINY, kv_heads=2, positions="rope", norm="rms", gated=True, bias=False, qkv_bias=False,
        tied=False,
    ),
    "moe": replace(
        TINY, layers=3, positions="rope", norm="rms", gated=True, bias=False, tied=False, experts=4,
        top_k=2, expert_ffn=8, shared_ffn=12, dense_layers=1, qk_norm=True, head_dim=6,
    ),
}  # fmt: skip


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_have_the_published_parameters(name):
    config = find(name).sizes
    assert isinstance(config, DecoderConfig)
    assert config.params() == pytest.approx(find(name).params, rel=0.005)
    for layers in (1, 2):  # and so, by induction, of the published depth
        model, _, _ = build(name, layers=layers, batch=1, seq=8)
        assert count(model) == config.with_layers(layers).params()
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_have_the_published_parameters(name):
    model, _, _ = build(name, batch=1)
    assert count(model) == pytest.approx(find(name).params, rel=0.002)


def on_cpu(config: DecoderConfig) -> torch.nn.Module:
    from autopar.presets.decoder import Decoder

    torch.manual_seed(0)
    return Decoder(config)


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_are_causal_and_have_gradients(kind):
    config = KINDS[kind]
    model = on_cpu(config)
    assert count(model) == config.params()
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, tokens)
    loss.backward()
    changed = tokens.clone()
    changed[:, 5] = 20
    model(changed, tokens)
    before, after = seen
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_experts_are_the_weighted_sum_of_perceptrons():
    from autopar.presets.decoder import Experts

    torch.manual_seed(0)
    config = replace(KINDS["moe"], shared_ffn=0)
    layer = Experts(config)
    x = torch.randn(2, 5, 16)
    odds = layer.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for place in range(5):
            best, chosen = odds[row, place].topk(2)
            for weight, expert in zip(best / best.sum(), chosen, strict=True):
                gate, up = (x[row, place] @ layer.up[expert]).chunk(2)
                y = (torch.nn.functional.silu(gate) * up) @ layer.down[expert]
                expected[row, place] += weight * y
    torch.testing.assert_close(layer(x), expected)


PLANS = (("dp=2", "ddp"), ("dp=2,tp=4", "megatron"), ("pp=2,dp=2", "ddp,microbatches=2"))


@pytest.mark.parametrize("name", ["gpt3-125m", "mpt-7b", "llama3-8b", "bert-base", "t5-base"])
def test_presets_are_planned(name):
    model, args, kwargs = build(name, layers=2, batch=8)
    for mesh, constraints in PLANS:
        plan = autopar.plan(model, None, args, kwargs, mesh=mesh, constraints=constraints)
        assert plan.to_json()


@pytest.mark.parametrize("name", ["mixtral-8x7b", "vit-base", "resnet50"])
def test_experts_and_images_are_planned(name):
    model, args, kwargs = build(name, layers=2, batch=8)
    autopar.plan(model, None, args, kwargs, mesh="dp=2,tp=4", constraints="megatron")
    autopar.plan(model, None, args, kwargs, mesh="pp=2", constraints="ddp")


def test_a_preset_is_a_model_of_the_command_line():
    loaded = load_model("gpt3-125m")
    assert count(loaded.model) == find("gpt3-125m").sizes.params()
    assert loaded.args[0].shape == (256, 2048)
    with pytest.raises(InputError, match="gpt3-175b"):
        load_model("gpt3-175")
    with pytest.raises(InputError, match="no preset"):
        find("gpt5")


def test_bad_sizes_are_refused():
    with pytest.raises(InputError, match="a sample has 9 tokens"):
        build_decoder(TINY, batch=1, seq=9)
    with pytest.raises(InputError, match="4 heads share 3"):
        replace(TINY, kv_heads=3)
    with pytest.raises(InputError, match="visits 0 of 4"):
        replace(TINY, experts=4)
    with pytest.raises(InputError, match="layers is 0"):
        replace(TINY, layers=0)
