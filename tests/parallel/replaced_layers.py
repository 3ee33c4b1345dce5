"""The layers of the table of replaced parameters: each with the same layer in plain PyTorch, on full tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear, rms_norm, silu

from transformer_plugin import nn as tnn
from transformer_plugin import parallel, recipes
from transformer_plugin.testing.distributed import Rank

#: Experts, rows, columns; tokens of a rank.
G, N, K, T = 4, 8, 16, 8
SIZES = torch.tensor([3, 0, 4, 1])

#: What the layers of a kind are. "plain" and "quantized" ones have the same full weight on all ranks.
KINDS = ("plain", "quantized", "sharded", "sliced", "quantized slices", "experts", "dtensor")


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


class Place(NamedTuple):
    """Of a rank, among those that divide something."""

    rank: int
    size: int


@dataclass(frozen=True)
class Case:
    """A layer in a model, of which one parameter is replaced."""

    kind: str
    #: The class of the layer, and makes the model on a rank: the layer is its ``layer``, or what ``path`` leads to.
    of: type
    make: Callable[[Rank], torch.nn.Module]
    #: The output of the layer for full parameters by name, and the input of all ranks.
    compute: Callable[[dict[str, Tensor], Tensor], Tensor]
    #: This rank's weight of a full one, of ``ranks``: the dimension that is divided, or None.
    dim: int | None = None
    path: str = "layer"
    name: str = "weight"
    #: Dimensions of input and output along which a rank has its chunk; None: it has all. "rows" 0, columns -1.
    input_dim: int | None = 0
    output_dim: int | None = 0
    draw: Callable[[int], Tensor] = lambda rows: drawn(rows, K, seed=1)
    #: Whether ranks add gradients of what they all have (data parallelism), or the layer does.
    adds: bool = True

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}"

    @property
    def is_quantized(self) -> bool:
        return self.kind.startswith("quantized")

    def shard_of(self, full: Tensor, rank: Rank) -> Tensor:
        """This rank's shard of a full weight."""
        return own(full, self.dim, rank)

    def full_sizes(self, sizes: Sequence[int], ranks: int) -> list[int]:
        """The sizes of a full weight of which each rank has equally much."""
        return [size * ranks if i == self.dim else size for i, size in enumerate(sizes)]

    def places(self, rank: Rank) -> tuple[Place, Place]:
        """This rank among those with other inputs, and among those with slices."""
        here, alone = Place(rank.rank, rank.size), Place(0, 1)
        return (here, alone) if self.adds else (alone, here)

    def data_group(self, rank: Rank) -> Any:
        """The ranks with other inputs."""
        return rank.group


def own(full: Tensor, dim: int | None, rank: Place | Rank) -> Tensor:
    if dim is None:
        return full.clone()
    each = -(-full.shape[dim] // rank.size)
    first = min(rank.rank * each, full.shape[dim])
    shard = full.narrow(dim, first, min(each, full.shape[dim] - first))
    sizes = [*full.shape]
    sizes[dim] = each - shard.shape[dim]
    return torch.cat([shard, full.new_zeros(sizes)], dim)


class Model(torch.nn.Module):
    """Calls a layer, with group sizes where it takes them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, tnn.MoE):
            return self.layer(x).output
        if isinstance(self.layer, tnn.GroupedMLP):
            return self.layer(x, SIZES.to(x.device), torch.ones(len(x), device=x.device))
        inner = getattr(self.layer, "base_layer", self.layer)
        return self.layer(x, SIZES.to(x.device)) if isinstance(inner, tnn.GroupedLinear) else self.layer(x)


# The same in plain PyTorch.


def of_linear(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return linear(x, p["layer.weight"])


def of_norm_linear(p: dict[str, Tensor], x: Tensor) -> Tensor:
    normal = layer_norm(x, (K,), p["layer.norm_weight"], p["layer.norm_bias"])
    return linear(normal, p["layer.weight"])


def of_grouped(p: dict[str, Tensor], x: Tensor) -> Tensor:
    weights = p["layer.weight"] if "layer.weight" in p else [p[f"layer.weight{g}"] for g in range(G)]
    shards = [linear(rows, weights[g]) for g, rows in enumerate(x.split(SIZES.tolist()))]
    return torch.cat(shards)


def of_mlp(p: dict[str, Tensor], x: Tensor) -> Tensor:
    outputs = []
    for g, rows in enumerate(x.split(SIZES.tolist())):
        gate, up = linear(rows, p["layer.fc1.weight"][g]).chunk(2, -1)
        outputs.append(linear(silu(gate) * up, p["layer.fc2.weight"][g]))
    return torch.cat(outputs)


def of_embedding(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return embedding(x, p["layer.weight"])


def of_rms_norm(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return rms_norm(x, (K,), p["layer.weight"], 1e-5)


def of_layer_norm(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer_norm(x, (K,), p["layer.weight"], p["layer.bias"])


def of_moe(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The best expert of each token, with its softmax as the weight."""
    weights, experts = linear(x, p["layer.router.weight"]).softmax(-1).max(-1)
    outputs = torch.zeros_like(x)
    for g in range(G):
        gate, up = linear(x, p["layer.experts.fc1.weight"][g]).chunk(2, -1)
        output = linear(silu(gate) * up, p["layer.experts.fc2.weight"][g]) * weights[:, None]
        outputs = outputs + output * (experts == g)[:, None]
    return outputs


# Makers.


def plain(layer: Callable[..., Any], *sizes: int, quantized: Any = None, **options: Any) -> Any:
    def make(rank: Rank) -> torch.nn.Module:
        torch.manual_seed(0)
        if quantized is None:
            return Model(layer(*sizes, **options).to(rank.device))
        with tnn.quantized_init(quantized):
            return Model(layer(*sizes, device=rank.device, **options))

    return make


def sharded(layer: Callable[..., Any], *sizes: int, **options: Any) -> Any:
    def make(rank: Rank) -> torch.nn.Module:
        return parallel.shard_(plain(layer, *sizes, **options)(rank), rank.group, gradient="sum")

    return make


def sliced(layer: Callable[..., Any], *sizes: int, quantized: Any = None, **options: Any) -> Any:
    def make(rank: Rank) -> torch.nn.Module:
        return plain(layer, *sizes, quantized=quantized, tp_group=rank.group, **options)(rank)

    return make


def moe(dtensor: bool, marks: bool = False) -> Any:
    def make(rank: Rank) -> torch.nn.Module:
        torch.manual_seed(0)
        options: Any = {
            "dispatch": tnn.DispatchConfig(max_tokens=T),
            "dtensor": dtensor,
            "device": rank.device,
        }
        router = tnn.RouterConfig(pre_softmax=True)
        layer = tnn.MoE(K, N, G, 1, group=rank.group, router=router, **options)
        one = [torch.distributed.new_group([each]) for each in range(rank.size)] if marks else []
        return parallel.shard_(Model(layer), one[rank.rank]) if marks else Model(layer)

    return make


def tokens(rows: int) -> Tensor:
    return torch.randint(N, (rows,), generator=torch.Generator().manual_seed(1))


ONE_ROW: dict[str, Any] = {"bias": False}
COLUMN: dict[str, Any] = {"bias": False, "parallel_mode": "column", "sequence_parallel": True}
ROW: dict[str, Any] = {"bias": False, "parallel_mode": "row", "sequence_parallel": True}
EXACT = recipes.BFloat16()
FP8 = recipes.Float8BlockScaling()
_TABLE: dict[str, Any] = {"compute": of_embedding, "draw": tokens}

CASES: dict[str, Case] = {
    "linear": Case("plain", tnn.Linear, plain(tnn.Linear, K, N, bias=False), of_linear),
    "norm_linear": Case(
        "plain", tnn.LayerNormLinear, plain(tnn.LayerNormLinear, K, N, bias=False), of_norm_linear
    ),
    "grouped": Case("plain", tnn.GroupedLinear, plain(tnn.GroupedLinear, G, K, N, bias=False), of_grouped),
    "list": Case(
        "plain",
        tnn.GroupedLinear,
        plain(tnn.GroupedLinear, G, K, N, bias=False, parameters="list"),
        of_grouped,
        name="weight2",
    ),
    "mlp": Case(
        "plain", tnn.GroupedMLP, plain(tnn.GroupedMLP, G, K, N, bias=False), of_mlp, path="layer.fc1"
    ),
    "embedding": Case("plain", tnn.Embedding, plain(tnn.Embedding, N, K), **_TABLE),
    "quantized_linear": Case(
        "quantized", tnn.Linear, plain(tnn.Linear, K, N, quantized=FP8, bias=False), of_linear
    ),
    "quantized_grouped": Case(
        "quantized",
        tnn.GroupedLinear,
        plain(tnn.GroupedLinear, G, K, N, quantized=FP8, bias=False),
        of_grouped,
    ),
    "quantized_column": Case(
        "quantized slices",
        tnn.Linear,
        sliced(tnn.Linear, K, N, quantized=FP8, **COLUMN),
        of_linear,
        dim=0,
        output_dim=-1,
        adds=False,
    ),
    "quantized_grouped_row": Case(
        "quantized slices",
        tnn.GroupedLinear,
        sliced(tnn.GroupedLinear, G, K, N, quantized=FP8, bias=False, parallel_mode="row"),
        of_grouped,
        dim=2,
        input_dim=-1,
        output_dim=None,
        adds=False,
    ),
    "sharded_linear": Case(
        "sharded", tnn.Linear, sharded(tnn.Linear, K, N - 1, bias=False), of_linear, dim=0
    ),
    "sharded_norm_linear": Case(
        "sharded",
        tnn.LayerNormLinear,
        sharded(tnn.LayerNormLinear, K, N, bias=False),
        of_norm_linear,
        dim=0,
    ),
    "sharded_grouped": Case(
        "sharded", tnn.GroupedLinear, sharded(tnn.GroupedLinear, G, K, N, bias=False), of_grouped, dim=0
    ),
    "sharded_list": Case(
        "sharded",
        tnn.GroupedLinear,
        sharded(tnn.GroupedLinear, G, K, N, bias=False, parameters="list"),
        of_grouped,
        dim=0,
        name="weight2",
    ),
    "sharded_mlp": Case(
        "sharded",
        tnn.GroupedMLP,
        sharded(tnn.GroupedMLP, G, K, N, bias=False),
        of_mlp,
        dim=0,
        path="layer.fc2",
    ),
    "sharded_embedding": Case("sharded", tnn.Embedding, sharded(tnn.Embedding, N, K), dim=0, **_TABLE),
    "column": Case(
        "sliced", tnn.Linear, sliced(tnn.Linear, K, N, **COLUMN), of_linear, dim=0, output_dim=-1, adds=False
    ),
    "row": Case(
        "sliced", tnn.Linear, sliced(tnn.Linear, K, N, **ROW), of_linear, dim=1, input_dim=-1, adds=False
    ),
    "norm_column": Case(
        "sliced",
        tnn.LayerNormLinear,
        sliced(tnn.LayerNormLinear, K, N, **COLUMN),
        of_norm_linear,
        dim=0,
        output_dim=-1,
        adds=False,
    ),
    "grouped_column": Case(
        "sliced",
        tnn.GroupedLinear,
        sliced(tnn.GroupedLinear, G, K, N, bias=False, parallel_mode="column"),
        of_grouped,
        dim=1,
        input_dim=None,
        output_dim=-1,
        adds=False,
    ),
    "grouped_row": Case(
        "sliced",
        tnn.GroupedLinear,
        sliced(tnn.GroupedLinear, G, K, N, bias=False, parallel_mode="row"),
        of_grouped,
        dim=2,
        input_dim=-1,
        output_dim=None,
        adds=False,
    ),
    "sliced_mlp": Case(
        "sliced",
        tnn.GroupedMLP,
        sliced(tnn.GroupedMLP, G, K, N, bias=False),
        of_mlp,
        dim=2,
        path="layer.fc2",
        input_dim=None,
        output_dim=None,
        adds=False,
    ),
    "sliced_embedding": Case(
        "sliced",
        tnn.Embedding,
        sliced(tnn.Embedding, N, K, sequence_parallel=True),
        dim=0,
        input_dim=None,
        adds=False,
        **_TABLE,
    ),
    "sequence_rms_norm": Case(
        "plain", tnn.RMSNorm, sliced(tnn.RMSNorm, K, sequence_parallel=True), of_rms_norm, adds=False
    ),
    "sequence_layer_norm": Case(
        "plain", tnn.LayerNorm, sliced(tnn.LayerNorm, K, sequence_parallel=True), of_layer_norm, adds=False
    ),
    "experts": Case("experts", tnn.MoE, moe(False, True), of_moe, dim=0, path="layer.experts.fc1"),
    "dtensor_experts": Case("dtensor", tnn.MoE, moe(True), of_moe, dim=0, path="layer.experts.fc2"),
}
