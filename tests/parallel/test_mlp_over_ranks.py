"""grouped_mlp over ranks: the bits of dispatch, grouped_mlp of received tokens, and combine; and its use by nn.MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.opcheck import opcheck
from tests.parallel.test_received_tokens import FORMS, Copying, layer, maps, results
from transformer_plugin import ops
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import EpCase, duplicated, masked, one_expert
from transformer_plugin.testing.numerics import assert_same_bits

_op = torch.ops.transformer_plugin.grouped_mlp.default
HIDDEN, FFN = 64, 32
FORMATS: dict[str, tuple[str, str, str]] = {
    "none": ("none",) * 3,
    "bf16": ("none",) * 3,
    "fp8_block": ("fp8_block", "fp8_block:square", "fp8_block"),
    "mxfp8": ("mxfp8",) * 3,
    "nvfp4": ("nvfp4", "nvfp4:square", "nvfp4"),
}
#: rows of each expert are multiples of 16, as nvfp4 requires.
CASES = [
    EpCase("uniform", hidden=HIDDEN, alignment=16, capacity=128),
    EpCase("masked", masked, hidden=HIDDEN, alignment=16, topk=3, capacity=128),
    EpCase("drops", duplicated, hidden=HIDDEN, alignment=16, topk=3, capacity=16),
    EpCase("no-tokens", hidden=HIDDEN, alignment=16, tokens=(0, 7, 4, 0), capacity=128),
    EpCase("no-rows", one_expert, hidden=HIDDEN, alignment=16, topk=1, capacity=128),
    EpCase("more-than-experts-of-a-rank", hidden=HIDDEN, alignment=16, topk=4, local_experts=1, capacity=64),
]
INPUTS = ("input", "fc1_weight", "fc2_weight", "probs", "fc1_bias", "fc2_bias")


class Call:
    """One rank's plan and operands of a case."""

    def __init__(self, rank: Rank, case: EpCase, recipe: str, form: str, bias: bool = True) -> None:
        self.rank, dtype = rank, torch.float32 if recipe == "none" else torch.bfloat16
        indices, tokens, weights = (each.to(rank.device) for each in case.draw(rank.rank, rank.size))
        sizes = (case.experts(rank.size), case.max_tokens, case.capacity, case.alignment, rank.size)
        options = FORMS[form]
        self.plan = (
            ep.plan(indices, *sizes, rank.group_name)
            if options is None
            else ep.compact_plan(indices, *sizes, rank.group_name, **options)
        )
        self.formats, self.group = FORMATS[recipe], (rank.group_name, 60_000)
        generator = torch.Generator().manual_seed(70 + rank.rank)
        experts = case.local_experts

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(rank.device, dtype)

        self.leaves = {
            "input": tokens.to(dtype),
            "fc1_weight": draw(experts, 2 * FFN, HIDDEN),
            "fc2_weight": draw(experts, HIDDEN, FFN),
            "probs": weights,
        }
        if bias:
            self.leaves.update(fc1_bias=draw(experts, 2 * FFN), fc2_bias=draw(experts, HIDDEN))
        self.grad = draw(len(tokens), HIDDEN)

    def requiring(self, needed: tuple[str, ...]) -> dict[str, Tensor]:
        """Fresh leaves, of which those need a gradient."""
        return {
            name: value.detach().clone().requires_grad_(name in needed) for name, value in self.leaves.items()
        }

    def arguments(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        names = ("input_format", "weight_format", "grad_format")
        arguments: dict[str, Any] = {**leaves, **dict(zip(names, self.formats, strict=True))}
        for name in ("fc1_weight", "fc2_weight"):
            arguments[name] = [arguments[name]]
        plan = self.plan
        return {**arguments, "group_sizes": plan.tokens_per_expert, "slot": plan.slot, "source": plan.source}

    def over_ranks(self) -> dict[str, Any]:
        received, position = maps(self.plan)
        exchange = dict(zip(("group_name", "timeout_ms"), self.group, strict=True))
        return {"over_ranks": True, **exchange, "received": received, "position": position}

    def one_op(self, leaves: dict[str, Tensor], **more: Any) -> Tensor:
        return ops.grouped_mlp(**self.arguments(leaves), **self.over_ranks(), **more)

    def three_ops(self, leaves: dict[str, Tensor], **more: Any) -> Tensor:
        plan, last = self.plan, (*self.group, -1, False, *maps(self.plan))
        tokens, probs = ep.dispatch(leaves["input"], leaves["probs"], plan.slot, plan.source, *last)
        arguments = {**self.arguments(leaves), "input": tokens, "probs": probs}
        sums = ops.grouped_mlp(**arguments, **more)
        return ep.combine(sums, plan.slot, plan.source, len(leaves["input"]), *last)


def check_gradients(call: Call, needed: tuple[str, ...], asked: tuple[str, ...] | None = None) -> None:
    """Output and gradients of both; autograd is ``asked`` for some of those ``needed``."""
    found = []
    for function in (call.one_op, call.three_ops):
        leaves = call.requiring(needed)
        output = function(leaves)
        wanted = [name for name in (needed if asked is None else asked) if name in leaves]
        grads = torch.autograd.grad(output, [leaves[name] for name in wanted], call.grad) if wanted else ()
        found.append({"output": output.detach()} | dict(zip(wanted, grads, strict=True)))
    for name, expected in found[1].items():
        assert_same_bits(found[0][name], expected, name)


def check_case(rank: Rank, recipe: str, form: str, cases: list[EpCase]) -> None:
    for case in cases:
        for bias in (False, True):
            try:
                check_gradients(Call(rank, case, recipe, form, bias), INPUTS)
            except Exception as error:
                raise AssertionError(f"case {case.name}, bias={bias}: {error}") from error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", FORMATS)
def test_same_bits_as_three_ops(pair: RankPool, recipe: str, form: str) -> None:
    pair.run(check_case, recipe, form, CASES)


@pytest.mark.parametrize("form", ["all", "compact", "records"])
def test_same_bits_of_one_and_four_ranks(make_pool: Any, form: str) -> None:
    for size in (1, 4):
        make_pool(size, "gloo").run(check_case, "bf16", form, CASES)


def check_some_inputs(rank: Rank, form: str) -> None:
    for case in CASES:
        call = Call(rank, case, "bf16", form)
        for needed in (
            (),
            *((name,) for name in INPUTS),
            ("fc1_weight", "fc2_weight"),
            ("input", "fc1_bias"),
        ):
            check_gradients(call, needed)
        for asked in (("input",), ("probs",), ("fc1_weight",), ("fc2_bias", "input")):
            check_gradients(call, INPUTS, asked)
        # Each rank asks for the gradient of another input, and the tokens of the others get all of theirs.
        check_gradients(call, INPUTS, (("input", "probs")[rank.rank % 2],))


@pytest.mark.parametrize("form", ["all", "records"])
def test_gradients_of_some_inputs(pair: RankPool, form: str) -> None:
    pair.run(check_some_inputs, form)


def check_zero_gradient(rank: Rank) -> None:
    """A rank whose output gets a gradient of zeros exchanges it."""
    found = []
    call = Call(rank, CASES[0], "bf16", "all")
    for function in (call.one_op, call.three_ops):
        leaves = call.requiring(INPUTS)
        output = function(leaves)
        if rank.rank == 0:
            output = output * 0
        output.float().sum().backward()
        found.append({name: leaf.grad for name, leaf in leaves.items()})
    for name in INPUTS:
        assert_same_bits(found[0][name], found[1][name], name)


def test_zero_gradient(pair: RankPool) -> None:
    pair.run(check_zero_gradient)


def check_main_grads(rank: Rank, queued: bool) -> None:
    """Gradients of the weights in buffers, at once or from a queue; and that of the input in a buffer."""
    found = []
    call = Call(rank, CASES[0], "bf16", "all")
    for function in (call.one_op, call.three_ops):
        leaves = call.requiring(INPUTS)
        buffers = {name: torch.ones(leaves[name].shape, device=rank.device) for name in INPUTS[1:3]}
        of_weights: dict[str, Any] = {f"{name[:3]}_main_grad": [buffer] for name, buffer in buffers.items()}
        queues = [torch.tensor(ops.new_wgrad_queue()) for _ in range(2)] if queued else []
        if queued:
            of_weights = {f"fc{i}_wgrad_queue": queue for i, queue in enumerate(queues, 1)}
        function(leaves, **of_weights).backward(call.grad)
        for queue, buffer in zip(queues, buffers.values(), strict=False):
            ops.run_deferred_wgrads(queue, [buffer], True)
            ops.release_wgrad_queue(int(queue))
        found.append(buffers | {name: leaves[name].grad for name in ("input", "probs")})
    for name, expected in found[1].items():
        assert_same_bits(found[0][name], expected, name)
    leaves, buffer = call.requiring(INPUTS), torch.empty_like(call.leaves["input"])
    (grad,) = torch.autograd.grad(call.one_op(leaves, dgrad_out=buffer), leaves["input"], call.grad)
    assert grad.data_ptr() == buffer.data_ptr() or not grad.numel()
    assert_same_bits(buffer, found[0]["input"])


@pytest.mark.parametrize("queued", [False, True])
def test_buffers(pair: RankPool, queued: bool) -> None:
    pair.run(check_main_grads, queued)


def check_compiled(rank: Rank, form: str) -> None:
    call = Call(rank, CASES[0], "fp8_block", form)

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        return (call.one_op(leaves) * call.grad).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, loss):
        leaves = call.requiring(INPUTS)
        found.append(torch.autograd.grad(function(leaves), list(leaves.values())))
    for got, expected, name in zip(*found, INPUTS, strict=True):
        assert_same_bits(got, expected, name)
    with torch.no_grad():
        leaves = call.requiring(())
        assert_same_bits(compiled(leaves), loss(leaves))


@pytest.mark.parametrize("form", ["all", "compact", "records"])
def test_compiled(pair: RankPool, form: str) -> None:
    pair.run(check_compiled, form)


def check_opcheck(rank: Rank, form: str) -> None:
    for needed in ((), INPUTS):
        call = Call(rank, CASES[1], "bf16", form)
        given = {**call.arguments(call.requiring(needed)), **call.over_ranks()}
        required = [given.pop(argument.name) for argument in _op._schema.arguments[:5]]
        opcheck(_op, tuple(required), given)


@pytest.mark.parametrize("form", ["all", "records"])
def test_opcheck(make_pool: Any, form: str) -> None:
    make_pool(2, "gloo").run(check_opcheck, form)


def check_errors(rank: Rank) -> None:
    """What is refused on every rank, before anything is sent."""
    call = Call(rank, CASES[0], "bf16", "compact")
    good = {**call.arguments(call.requiring(())), **call.over_ranks()}
    probs, slot = good["probs"], good["slot"]
    cases: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"probs": probs.bfloat16()}, "probs", TypeError),
        ({"probs": probs[:, :1]}, "probs", ValueError),
        ({"probs": probs.flatten()}, "probs", ValueError),
        ({"slot": None, "source": None}, "slot", ValueError),
        ({"source": None}, "source", ValueError),
        ({"slot": slot.long()}, "slot", TypeError),
        ({"received": None}, "received", ValueError),
        ({"position": None}, "position", ValueError),
        ({"timeout_ms": 10**12 + 1}, "timeout_ms", ValueError),
        ({"over_ranks": False, "group_name": ""}, "received", ValueError),
        ({"over_ranks": False, "received": None, "position": None}, "group_name", ValueError),
    ]
    for change, name, kind in cases:
        with pytest.raises(kind, match=f"transformer_plugin::grouped_mlp: argument '{name}': expected"):
            ops.grouped_mlp(**{**good, **change})
    # Ranks whose gradients differ say so, and the group stays usable.
    leaves = call.requiring(("input",) if rank.rank == 0 else ("probs",))
    with pytest.raises(ValueError, match="on rank 0"):
        call.one_op(leaves)
    call.one_op(call.requiring(()))


def test_errors(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_errors)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("an exchange outside of the experts' op")


def check_layer(rank: Rank, recipe: str, transport: Any) -> None:
    """The layer exchanges in the experts' op; with a hook of the user, or another forward, by ops of its own."""
    multiple = 16 if recipe == "nvfp4" else 1
    for sizes in ({}, {"max_received_tokens": 30, "capacity": 64}):
        config = DispatchConfig(max_tokens=48, alignment=multiple, transport=transport, **sizes)
        layers: list[MoE] = [layer(rank, recipe, config) for _ in range(5)]
        fused, hooked, prehooked, back_hooked, copying = layers
        fused.dispatcher.context.dispatch = refuse  # type: ignore[union-attr, method-assign, assignment]
        fused.experts._between_exchanges = refuse  # type: ignore[method-assign, assignment]
        calls: list[str] = []
        hooked.experts.register_forward_hook(lambda *_: calls.append("forward"))  # noqa: B023
        prehooked.experts.register_forward_pre_hook(lambda *_: calls.append("before"))  # noqa: B023
        back_hooked.experts.fc1.register_full_backward_hook(lambda *_: calls.append("backward"))  # noqa: B023
        copying.experts.__class__ = Copying
        count = (48, 0, 17, 40)[rank.rank % 4]
        got, *others = (results(each, rank, count) for each in layers)
        assert calls == ["forward", "before", "backward"]
        for other in others:
            for name, expected in other.items():
                assert_same_bits(got[name], expected, name)


@pytest.mark.parametrize("transport", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("recipe", FORMATS)
def test_layer(pair: RankPool, recipe: str, transport: str) -> None:
    pair.run(check_layer, recipe, transport)


def check_fsdp2(rank: Rank) -> None:
    """Experts that FSDP2 wraps exchange themselves unless it casts what they get or return."""
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("copies", "experts"))
    bf16, single = torch.bfloat16, torch.float32
    for policy, exchanges in (
        (MixedPrecisionPolicy(), True),
        (MixedPrecisionPolicy(param_dtype=bf16), True),
        (MixedPrecisionPolicy(param_dtype=bf16, output_dtype=bf16), True),
        (MixedPrecisionPolicy(param_dtype=bf16, output_dtype=single), False),
        (MixedPrecisionPolicy(param_dtype=single), False),
    ):
        found = []
        for hooked in (False, True):
            moe = layer(rank, "bf16", DispatchConfig(max_tokens=48))
            if hooked:
                moe.experts.register_forward_hook(lambda *_: None)
            fully_shard(moe.experts, mesh=mesh["copies"], mp_policy=policy)
            calls: list[bool] = []
            context: Any = moe.dispatcher.context  # type: ignore[union-attr]
            dispatch = context.dispatch
            context.dispatch = lambda *args, **options: calls.append(True) or dispatch(*args, **options)  # noqa: B023
            moe.experts._between_exchanges = refuse  # type: ignore[method-assign, assignment]
            found.append(moe(torch.ones(5, 64, device=rank.device, dtype=bf16)).output)
            assert bool(calls) == (hooked or not exchanges), policy
        assert_same_bits(*(each.detach() for each in found))


def test_fsdp2(pair: RankPool) -> None:
    pair.run(check_fsdp2)


def check_autocast(rank: Rank) -> None:
    moe = layer(rank, "none", DispatchConfig(max_tokens=48))
    other = layer(rank, "none", DispatchConfig(max_tokens=48))
    other.experts.__class__ = Copying
    experts: Any = moe.experts
    calls, three_ops = [], experts._between_exchanges
    experts._between_exchanges = lambda *args: calls.append(True) or three_ops(*args)
    with torch.autocast(rank.device.type, dtype=torch.bfloat16):
        got, expected = (results(each, rank, 17) for each in (moe, other))
    for name in expected:
        assert_same_bits(got[name], expected[name], name)
    assert calls


def test_autocast(pair: RankPool) -> None:
    pair.run(check_autocast)
