"""Whole models: the graph on real tensors equals eager."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from autopar.graph.blocks import find_blocks
from autopar.trace import trace
from autopar.trace.reference import run_graph
from tests.models import zoo
from tests.unit.trace.support import check_against_eager


@pytest.mark.parametrize("name", zoo.ALL)
def test_a_model_of_the_zoo(name):
    torch.manual_seed(0)
    traced = check_against_eager(*zoo.ALL[name]())
    assert traced.loss is not None
    if name in zoo.HF and name != "vit":
        assert "use_cache" in traced.notes[0]


def test_tied_parameters_appear_once():
    traced = trace(*zoo.gpt())
    assert traced.aliases == {"head.weight": "tokens.weight"}
    assert "head.weight" not in traced.parameters
    assert sum(item.target == "tokens.weight" for item in traced.graph.inputs) == 1


def test_nodes_know_their_module_and_line():
    traced = trace(*zoo.gpt())
    linear = [node for node in traced.graph.nodes if node.op == "aten.linear.default"]
    assert linear[0].module == "blocks.0.qkv"
    file, line = linear[0].source.rsplit(":", 1)
    assert file.endswith("zoo.py")
    assert int(line) > 100


def test_loss_function_is_traced_outside_the_module_paths():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)

    def loss(y, given):
        return (y - given[:, :2]).pow(2).mean()

    traced = check_against_eager(model, (x,), {}, loss)
    assert {node.module for node in traced.graph.nodes} == {"0", "1", "2", ""}
    assert set(traced.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_same_tensor_given_twice_is_two_inputs():
    ids = zoo.tokens()
    traced = trace(*zoo.gpt())
    other = zoo.tokens(seed=5)
    given = run_graph(traced, (ids,), {"labels": other}).loss
    model = zoo.gpt()[0]
    model.load_state_dict(
        dict(traced.parameters) | {"head.weight": traced.parameters["tokens.weight"]}
    )
    assert torch.equal(given, model(ids, other))


class Views(nn.Module):
    """Writes in place in many ways."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, keep):
        h = self.first(x)
        h[:, 0] += 1.0
        h[..., 1:3].mul_(0.5)
        h.transpose(0, 1)[2].add_(1)
        flat = h.view(-1)
        flat.clamp_(-2, 2)
        table = torch.zeros(x.shape[0], x.shape[1] + 1, 6)
        table[:, 1:] = h
        table.index_add_(1, torch.tensor([0]), h[:, :1])
        table[table > 1.5] = 0.25
        mask = keep.clone()
        mask[:, -1] = False
        h = (F.relu(h + 0.0, inplace=True) + 0.0).masked_fill_(~mask[..., None], 0.0)
        pieces = list((x * 2).chunk(2, dim=-1))
        pieces[0].zero_()
        keep.logical_not_()
        return self.second(h + table[:, :-1]).sum() + pieces[1].sum() + keep.float().mean()


def test_writes_in_place_and_through_views():
    x, keep = torch.randn(3, 4, 6), torch.rand(3, 4) > 0.3
    traced = trace(Views(), (x, keep))
    eager = Views()
    eager.load_state_dict(traced.parameters)
    expected = eager(x.clone(), keep.clone())
    expected.backward()
    kept = x.clone(), keep.clone()
    run = run_graph(traced, (x, keep))
    run.loss.backward()
    assert torch.equal(x, kept[0])
    assert torch.equal(keep, kept[1])
    assert torch.equal(run.loss, expected)
    for name, parameter in eager.named_parameters():
        assert torch.equal(parameter.grad, traced.parameters[name].grad)


class Statistics(nn.Module):
    """Buffers that forward updates, a teacher without gradients, and an input cast."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.teacher, self.student = nn.Linear(6, 6), spectral_norm(nn.Linear(6, 6))
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            target = torch.tanh(self.teacher(x.flatten(0, 1))) - self.center
            self.center.mul_(0.9).add_(0.1 * target.mean(0).double())
            self.calls += 1
        y = self.norm(self.student(x.flatten(0, 1)))
        y = self.instance(y.unflatten(0, x.shape[:2]))
        return (y.flatten(0, 1) - target).pow(2).mean()


def test_buffers_that_forward_updates():
    torch.manual_seed(0)
    traced = check_against_eager(Statistics(), (torch.randn(3, 4, 6),), {}, tolerance=1e-5)
    updated = {item.target for item in traced.graph.outputs if item.kind == "buffer"}
    assert {"center", "calls", "norm.running_mean", "instance.running_var"} <= updated
    assert not next(i for i in traced.graph.inputs if i.target == "calls").persistent
    assert any(name.endswith("_u") for name in updated)
    run = run_graph(traced, (torch.randn(3, 4, 6),))
    run.loss.backward()
    assert traced.parameters["teacher.weight"].grad is None


def test_evaluation_mode_updates_nothing():
    model = Statistics().eval()
    traced = check_against_eager(model, (torch.randn(3, 4, 6),), {}, tolerance=1e-5)
    updated = {item.target for item in traced.graph.outputs if item.kind == "buffer"}
    assert updated == {"center", "calls"}


class Autocast(nn.Module):
    """A region of reduced precision."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                z = self.fc(x)
        return (y.float() + z).sum()


def test_autocast_regions_are_contexts():
    traced = check_against_eager(Autocast(), (torch.randn(2, 4),), {})
    contexts = [n.context for n in traced.graph.nodes if n.op == "aten.linear.default"]
    assert contexts == [("autocast", "cpu", "bfloat16"), ()]


def test_recurrent_and_dropout():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(14, 2, 16, dropout=0.25, batch_first=True), 2
            )

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.encoder(self.lstm(x)[0], mask=mask).pow(2).mean()

    check_against_eager(Net(), (torch.randn(2, 4, 5),), {})


def test_frozen_parameters_and_flags():
    model, args, kwargs = zoo.gpt()
    model.tokens.requires_grad_(False)
    model.places.requires_grad_(False)
    traced = check_against_eager(model, args, kwargs)
    assert traced.frozen == ("tokens.weight", "places.weight")
    graph = traced.graph
    embedding = next(node for node in graph.nodes if node.op == "aten.embedding.default")
    assert not embedding.outputs[0].spec.requires_grad
    assert graph.spec(traced.loss).requires_grad


def test_checkpointed_regions_are_plain_calls():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(self.a, self.a(x), use_reentrant=False)
            return checkpoint(lambda y: self.b(y).tanh(), x, use_reentrant=True).sum()

    traced = check_against_eager(Net(), (torch.randn(2, 4),), {})
    assert any("2 regions" in note for note in traced.notes)


def test_the_module_is_left_as_it_was():
    model, args, kwargs = zoo.llama()
    before = {path: copy.copy(vars(child)) for path, child in model.named_modules()}
    hooks = {path: len(child._forward_hooks) for path, child in model.named_modules()}
    trace(model, args, kwargs | {"output_hidden_states": True})
    assert model.config.use_cache is True
    for path, child in model.named_modules():
        assert vars(child) == before[path]
        assert len(child._forward_hooks) == hooks[path]


def test_model_on_meta_with_inputs_that_are_not():
    with torch.device("meta"):
        model = zoo.gpt()[0]
    traced = trace(model, (zoo.tokens(),), {"labels": zoo.tokens()})
    assert all(parameter.is_meta for parameter in traced.parameters.values())


def test_sparse_gradients_are_made_dense():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode="mean")
            self.rows = nn.Embedding(9, 4, sparse=True)

        def forward(self, flat, starts, ids):
            return (self.bag(flat, starts) * self.rows(ids)).sum()

    args = (torch.tensor([1, 2, 0, 5]), torch.tensor([0, 1]), torch.tensor([3, 3]))
    traced = trace(Net(), args)
    run = run_graph(traced, args)
    run.loss.backward()
    assert not traced.parameters["rows.weight"].grad.is_sparse
    assert "rows" in traced.notes[0]


def test_blocks_of_a_traced_model():
    (block,) = find_blocks(trace(*zoo.gpt(5)).graph)
    assert block.paths == tuple(f"blocks.{i}" for i in range(5))
    assert block.inputs[3][1] == "blocks.3.norm1.weight"
    assert len(block.outputs[0]) == 1


def test_tracing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(*zoo.resnet())
