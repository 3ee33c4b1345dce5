"""Muon on full matrices, stacks of experts, and sharded matrices, beside torch's on full matrices."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from tests.parallel.muon_models import (
    Reference,
    drawn_grads,
    give,
    twins,
    weights_of,
)
from tests.parallel.sharded_models import dense_batch
from transformer_plugin import nn as tnn
from transformer_plugin import optim, parallel
from transformer_plugin.optim import _full_matrices, _muon, _newton_schulz
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

pytestmark = pytest.mark.bits

#: Options that matter for shards: which tensor is gathered, and the sizes that adjust the learning rate.
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.3},
]
ADJUSTMENTS = [{"lr": 0.02, "adjust_lr_fn": name} for name in _muon.ADJUSTMENTS if _muon._torch_takes(name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [*OPTIONS, *ADJUSTMENTS[2:], {"lr": torch.tensor(0.01), "ns_steps": 3, "momentum": 0.5}]
)
def test_full_matrices(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The bits of torch's, also with closures, after saving, and of matrices without a gradient."""
    torch.manual_seed(0)
    shapes = (48, 96), (96, 48), (7, 43), (1, 5), (8, 8)
    values = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    sets = [[Parameter(value.clone()) for value in values] for _ in range(2)]
    optimizers = [kind(p, **options) for kind, p in zip((torch.optim.Muon, optim.Muon), sets, strict=True)]
    for step in range(3):
        grads = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes[: 4 + step]]
        for parameters, optimizer in zip(sets, optimizers, strict=True):

            def closure(parameters: list[Parameter] = parameters, grads: list[Tensor] = grads) -> str:
                assert torch.is_grad_enabled()
                for parameter, grad in zip(parameters, grads, strict=False):
                    parameter.grad = grad.clone()
                return "loss"

            assert optimizer.step(closure) == "loss"  # type: ignore[arg-type]
        for one, two in zip(*sets, strict=True):
            assert_same_bits(two.detach(), one.detach())
            assert optimizers[0].state[one].keys() == optimizers[1].state[two].keys()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert pickle.loads(pickle.dumps(optimizers[1])).step() is None


@pytest.mark.parametrize("shape", [(3, 96, 48), (4, 48, 96), (2, 7, 43), (1, 64, 64), (0, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each matrix gives what torch gives for it: on a CPU the same bits."""
    torch.manual_seed(0)
    stack = Parameter(torch.randn(shape, device=device, dtype=dtype))
    alone = [Parameter(matrix.detach().clone()) for matrix in stack]
    optimizers = [optim.Muon([stack], lr=0.1)] + ([torch.optim.Muon(alone, lr=0.1)] if alone else [])
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for parameter, grad in zip(alone, stack.grad, strict=True):
            parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for i, parameter in enumerate(alone):
        if device.type == "cpu":
            assert_same_bits(stack[i].detach(), parameter.detach())
        else:
            assert relative_error(stack[i].detach(), parameter.detach()) < 2**-6


def test_the_momentum_of_a_stack_is_not_divided(device: torch.device) -> None:
    stack = Parameter(torch.zeros(2, 8, 5, device=device, dtype=torch.bfloat16))
    stack.grad = torch.ones_like(stack)
    optimizer = optim.Muon([stack], nesterov=False, momentum=0.5)
    optimizer.step()
    assert_same_bits(optimizer.state[stack]["momentum_buffer"], stack.grad / 2)


def test_arguments_are_those_of_torch() -> None:
    own, torchs = (inspect.signature(kind).parameters for kind in (optim.Muon, torch.optim.Muon))
    assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in torchs.values()]
    assert optim.Muon([torch.ones(2, 2)]).defaults == torch.optim.Muon([torch.ones(2, 2)]).defaults


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((8,), {}, r"argument 'params': expected matrices \[N, K\] or stacks \[G, N, K\], got Tensor \[8\]"),
        ((2, 2, 2, 2), {}, "Give biases and norms to another optimizer"),
        *(
            (
                (4, 4),
                {name: value},
                rf"Muon: argument '{name}': expected a finite number from 0, got {value}\. ",
            )
            for name in ("lr", "weight_decay", "momentum", "eps")
            for value in (-1.0, float("nan"), float("inf"))
        ),
        ((4, 4), {"lr": torch.tensor(-0.5)}, "argument 'lr': expected a finite number from 0"),
        (
            (4, 4),
            {"adjust_lr_fn": "none"},
            r"expected 'original', 'match_rms_adamw'(, 'spectral_unclamped')? or None, got 'none'",
        ),
        ((4, 4), {"ns_steps": 0}, "argument 'ns_steps': expected from 1 to 99, got 0"),
        (
            (4, 4),
            {"ns_coefficients": (1.0, float("nan"), 2.0)},
            "argument 'ns_coefficients': expected three finite",
        ),
        ((4, 4), {"ns_coefficients": [1.0, 2.0, "x"]}, "argument 'ns_coefficients': expected three finite"),
        ((4, 4), {"ns_steps": 100}, "Muon: argument 'ns_steps': expected from 1 to 99, got 100"),
        (
            (4, 4),
            {"ns_coefficients": (1.0, 2.0)},
            "argument 'ns_coefficients': expected three finite numbers",
        ),
    ],
)
def test_wrong_arguments(shape: tuple[int, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        optim.Muon([torch.ones(shape)], **options)
    right = optim.Muon([torch.ones(4, 4)])
    with pytest.raises(ValueError, match=text):
        right.add_param_group({"params": [torch.ones(shape)], **options})
    assert len(right.param_groups) == 1


def check_parity(rank: Rank, tp: int, key: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Steps of a model over a mesh, and of torch's Muon on full matrices: the same bits."""
    default = _full_matrices.BUCKET_BYTES
    for limit in (20_000, default):  # a few matrices at a time, and all
        full, model, _ = twins(rank, tp, key, dtype)
        reference = Reference(full, **options)
        optimizer = optim.Muon(weights_of(model).values(), **options)
        _full_matrices.BUCKET_BYTES = limit
        try:
            for step in range(3):
                grads = drawn_grads(full, step)
                if step == 1:
                    grads["down.weight"].zero_()
                give(model, grads)
                reference.step(grads)
                optimizer.step()
        finally:
            _full_matrices.BUCKET_BYTES = default
        reference.compare(model, optimizer)


#: Of torch's Muon, bfloat16 momentum of matrices may change in place, and that of stacks must not.
MESHES = [
    (1, 1, "bf16", torch.bfloat16, 0),
    (2, 1, "fp8_block", torch.bfloat16, 0),
    (2, 2, "bf16", torch.bfloat16, 0),
    (3, 1, "bf16", torch.float32, 1),
    (3, 3, "bf16", torch.float32, 0),
    (4, 1, "fp8_block", torch.bfloat16, 0),
    (4, 2, "bf16", torch.float32, 1),
    (4, 2, "bf16", torch.bfloat16, 0),
    (4, 4, "bf16", torch.bfloat16, 0),
]


@pytest.mark.parametrize(("ranks", "tp", "key", "dtype", "options"), MESHES)
def test_shards_have_the_bits_of_full_matrices(
    make_pool: Callable[..., RankPool], ranks: int, tp: int, key: str, dtype: torch.dtype, options: int
) -> None:
    make_pool(ranks).run(check_parity, tp, key, dtype, OPTIONS[options])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_shards_on_gpus(pair_of_gpus: RankPool, key: str, tp: int) -> None:
    pair_of_gpus.run(check_parity, tp, key, torch.bfloat16, OPTIONS[0])


def check_momentum_without_nesterov(rank: Rank) -> None:
    """Of bfloat16 matrices, which some versions of torch divide in place: all ranks then have the same momentum."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": False, "device": rank.device, "dtype": torch.bfloat16}
    full = torch.nn.Sequential(*(tnn.Linear(43, 7, **options) for _ in range(4)))
    sharded = shard_(copy.deepcopy(full), rank.group)
    reference = Reference(full, nesterov=False)
    optimizer = optim.Muon(sharded.parameters(), nesterov=False)
    for step in range(3):
        grads = drawn_grads(full, step)
        give(sharded, grads)
        reference.step(grads)
        optimizer.step()
    reference.compare(sharded, optimizer)


def test_momentum_without_nesterov(pair: RankPool) -> None:
    pair.run(check_momentum_without_nesterov)


def check_shared_work(rank: Rank, tp: int) -> None:
    """Each of four ranks orthogonalizes a fourth of equal matrices, and one alone where there is one."""
    mesh = init_device_mesh(rank.device.type, (rank.size // tp, tp), mesh_dim_names=("data", "tp"))
    options: dict[str, Any] = {"parallel_mode": "column", "tp_group": mesh["tp"]} if tp > 1 else {}
    calls: list[torch.Size] = []

    def counted(full: Tensor, **options: Any) -> Tensor:
        calls.append(full.shape)
        return _newton_schulz.orthogonalized(full, **options)

    for count, expected in ((8, 8 // rank.size), (1, 1)):
        layers = [tnn.Linear(32, 64, False, device=rank.device, **options) for _ in range(count)]
        model = shard_(torch.nn.Sequential(*layers), mesh["data"])
        optimizer = optim.Muon(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_muon, "orthogonalized", counted)
            optimizer.step()
        assert calls == [(64, 32)] * expected


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_share_the_work(four: RankPool, tp: int) -> None:
    four.run(check_shared_work, tp)


def check_training(rank: Rank) -> None:
    """Backwards of other batches on each rank, Muon for hidden weights and AdamW for the rest."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": rank.device, "dtype": torch.bfloat16}
    full = torch.nn.Sequential(tnn.Linear(128, 96, **options), tnn.LayerNormLinear(96, 37, False, **options))
    sharded = parallel.data_parallel(shard_(copy.deepcopy(full), rank.group))
    optimizers = []
    for model, kind in ((full, torch.optim.Muon), (sharded, optim.Muon)):
        hidden = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() == 1]
        optimizers += [kind(hidden, lr=0.1), torch.optim.AdamW(others, lr=0.1)]
    for step in range(3):
        means = {name: 0.0 for name, _ in full.named_parameters()}
        for other in range(rank.size):
            batch = dense_batch(other, step, rank.device).arguments[0]
            for model in [full] + [sharded] * (other == rank.rank):
                model.zero_grad()
                model(batch).float().square().sum().backward()
            for name, parameter in full.named_parameters():
                means[name] = means[name] + parameter.grad.float()  # type: ignore[union-attr, assignment]
        for (name, parameter), other in zip(full.named_parameters(), sharded.parameters(), strict=True):
            parameter.grad = (means[name] * (1 / rank.size)).to(parameter.dtype)  # type: ignore[attr-defined]
            if shard_of_parameter(other) is None:
                other.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(full.parameters(), sharded.parameters(), strict=True):
        assert_same_bits(full_weight(other), one.detach())


def test_training(ranks: RankPool) -> None:
    ranks.run(check_training)
