"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

Shapes: B sequences of T bytes, D model width, V = 256 byte values. All layers are this package's, or all are plain
PyTorch's (``reference.PlainMoE``); both have the same parameters under the same names. With tensor parallelism over R
ranks, a rank has all B sequences with some heads or logits, and between these layers B / R sequences with all D.
"""

from __future__ import annotations

import hashlib
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_lm.config import Config
from moe_lm.dense import DenseLayers

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config, dense: DenseLayers) -> None:
        super().__init__()
        self.heads = config.heads // dense.size  # of this rank
        self.qkv = dense.column(config.dim, config.dim, config.dim, config.dim)
        self.out = dense.row(config.dim, config.dim)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Su et al., "RoFormer", 2021: rotates the pairs (i, i + half) by an angle proportional to the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mixture(norm(x))``."""

    def __init__(self, config: Config, mesh: DeviceMesh, dense: DenseLayers) -> None:
        super().__init__()
        self.norm1 = dense.norm(config.dim)
        self.attention = Attention(config, dense)
        self.norm2 = dense.norm(config.dim)
        self.moe = build_moe(config, mesh, dense)
        self.dtype = getattr(torch, config.dtype)
        # With the mesh of trainer.shard, FSDP2 does not convert the experts.
        self.converts_experts = config.dtype != "float32" and not config.reference

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos, sin)
        normed_BTD = self.norm2(x_BTD)
        converts = self.converts_experts or torch.is_autocast_enabled(x_BTD.device.type)
        with torch.autocast(x_BTD.device.type, self.dtype, enabled=converts):
            mixture = self.moe(normed_BTD)
        return x_BTD + mixture.output, mixture.aux_loss


class LanguageModel(nn.Module):
    """Computes logits over the next byte from bytes.

    Args:
        config: the sizes.
        mesh: the ranks that share the experts.
        device: the device of the parameters, which are float32.
        dtype: the dtype of the activations.
        tensor_ranks: the ranks that share the dense layers and the sequences; None: each has its own.
    """

    def __init__(
        self,
        config: Config,
        mesh: DeviceMesh,
        device: torch.device | str,
        dtype: torch.dtype,
        tensor_ranks: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        dense = DenseLayers(config.reference, tensor_ranks, device)
        self.embedding = dense.embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config, mesh, dense) for _ in range(config.layers))
        self.norm = dense.norm(config.dim)
        padding = {} if tensor_ranks is None else {"pad_outputs": True}
        self.head = dense.column(config.dim, VOCABULARY, **padding)
        half = config.dim // config.heads // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(config.seq_len)[:, None] * frequency
        self.register_buffer("cos", angle.cos().to(device, dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(device, dtype), persistent=False)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits and the sum of the layers' load-balancing losses.

        The logits are float32 ``[B, T, V]``, with tensor parallelism this rank's columns of them.
        """
        T = tokens_BT.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x_BTD = self.embedding(tokens_BT)
        balance = torch.zeros((), device=x_BTD.device)
        for block in self.blocks:
            x_BTD, aux_loss = block(x_BTD, cos, sin)
            balance = balance + aux_loss
        return self.head(self.norm(x_BTD)).float(), balance


def build_moe(config: Config, mesh: DeviceMesh, dense: DenseLayers) -> nn.Module:
    """Makes one mixture. It returns ``.output``, shaped like its input, and ``.aux_loss``, already times its factor."""
    if config.reference:
        from moe_lm.reference import PlainMoE

        sizes = config.dim, config.hidden, config.experts, config.topk
        return PlainMoE(*sizes, mesh, config.aux_loss_coeff, device=dense.device)
    import transformer_plugin.nn as tpnn
    from transformer_plugin.formats import Format
    from transformer_plugin.recipes import recipe_from_name

    tokens = config.batch_size // dense.size * config.seq_len
    even_share = tokens * config.topk  # rows per rank if all experts get the same number
    recipe = recipe_from_name(config.format)
    rows = (
        Format.parse(recipe.input_format).group_multiple if recipe else 1
    )  # the multiple to which an expert's rows are padded
    capacity = -(-int(config.capacity_factor * even_share) // rows) * rows
    return tpnn.MoE(
        config.dim,
        config.hidden,
        config.experts,
        config.topk,
        mesh=mesh if mesh.size() > 1 else None,
        parameters=config.parameters,
        router=tpnn.RouterConfig(aux_loss_coeff=config.aux_loss_coeff),
        dispatch=tpnn.DispatchConfig(
            capacity=capacity if config.capacity_factor else None,
            max_tokens=tokens,
            alignment=config.alignment or None,
        ),
        recipe=recipe_from_name(config.format),
        device=dense.device,
        **dense.sequence_parallel,
    )


@torch.no_grad()
def initialise(model: nn.Module, config: Config) -> None:
    """Sets weights that depend only on (seed, name): equal for all implementations, layouts and numbers of ranks."""
    packed: dict[str, Tensor] = {}  # of the layout "list", which has one parameter for each expert
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    divided: dict[str, Tensor] = {}  # whole tensors, of which a rank has slices
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
        elif match := re.fullmatch(r"(.*\.experts\..*\.weight)(\d+)", name):
            if match[1] not in packed:
                packed[match[1]] = _drawn(match[1], (config.experts, *parameter.shape), config)
            parameter.copy_(packed[match[1]][int(match[2])])
        elif shapes[name] != tuple(parameter.shape):
            divided[name] = _drawn(name, shapes[name], config)
        else:
            _set(parameter, _drawn(name, shapes[name], config))
    model.load_state_dict(divided, strict=False)


def _drawn(name: str, shape: tuple[int, ...], config: Config) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{name}".encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(seed)
    into_residual = name.endswith(("attention.out.weight", "fc2.weight"))
    std = shape[-1] ** -0.5 * ((2 * config.layers) ** -0.5 if into_residual else 1.0)
    if name.startswith(("embedding", "head")):
        std = 0.02
    return torch.randn(shape, generator=generator) * std


def _set(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter, DTensor):  # experts, of which this rank has a shard
        mesh = parameter.device_mesh
        parameter.to_local().copy_(value.chunk(mesh.size())[mesh.get_local_rank()])
    else:
        parameter.copy_(value)
