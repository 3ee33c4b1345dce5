"""MoE: a mixture of experts, on one rank or sharded over a group of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from transformer_plugin._arguments import check_dtype, class_name, typed
from transformer_plugin.activations import Activation
from transformer_plugin.launch import LaunchOptions
from transformer_plugin.nn import _tracing
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._autocast import operand
from transformer_plugin.nn._caller_buffers import check_buffer, copied_into, with_gradient_into
from transformer_plugin.nn._containers import LayerContainer, row_rules_in
from transformer_plugin.nn._formats import DTYPES, RowRules, formats_of, row_rules
from transformer_plugin.nn._layouts import Layout
from transformer_plugin.nn._mlp_activation import chosen_activation
from transformer_plugin.nn._module import check_sizes, layer_forward, registered, serializable
from transformer_plugin.nn._tensor_parallel import TensorParallel, same_on_ranks, sequence_parallel_group
from transformer_plugin.nn.grouped_mlp import GroupedMLP
from transformer_plugin.nn.quantized_parameters import chosen_recipe
from transformer_plugin.nn.router import RouterConfig, TopKRouter, returns_tokens
from transformer_plugin.parallel._ranks import group_and_mesh, mesh_of
from transformer_plugin.parallel._shard_experts import shard_experts
from transformer_plugin.parallel._wrapping import install_wrapper_checks
from transformer_plugin.parallel.token_dispatcher import DispatchConfig, LocalTokenDispatcher, TokenDispatcher
from transformer_plugin.recipes import Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@serializable
class MoEOutput(NamedTuple):
    """The result of :class:`MoE`. The module stores nothing, so compiled and eager steps are the same."""

    #: the shape and dtype of the input; under ``torch.autocast`` in its dtype.
    output: Tensor
    #: float32 scalar, the auxiliary load-balancing loss times its coefficient; 0 without one. Add it to the loss.
    aux_loss: Tensor
    #: int64 ``[E]``, how many of this rank's tokens chose each expert.
    expert_load: Tensor
    #: int64 ``[1]``, rows that this rank's experts need, padding included, before any is dropped. On a GPU few tokens
    #: are not padded where their number is known; a trace, or a graph of any number of tokens, pads them too.
    received: Tensor


def _reset(module: torch.nn.Module) -> None:
    """Sets fresh initial values. A wrapper without ``reset_parameters`` is searched for modules that have it."""
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)


def _check_types(router: Any, dispatch: Any, recipe: Any, dtype: torch.dtype | None) -> None:
    """Checks the types of the constructor's arguments before they are used."""
    for name, value, kind in (
        ("router", router, RouterConfig),
        ("dispatch", dispatch, DispatchConfig),
        ("recipe", recipe, Recipe),
    ):
        if not isinstance(value, kind) and not (name == "recipe" and value is None):
            raise TypeError(
                f"transformer_plugin::MoE: argument '{name}': expected a {kind.__name__}, got {value!r}. Construct "
                "one, or leave the argument out."
            )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise TypeError(
            f"transformer_plugin::MoE: argument 'dtype': expected float32, bfloat16 or float16, got {dtype}. Leave it "
            "out for float32."
        )


def _check_layout(parameters: Any, dtensor: bool, group: Any, mesh: Any) -> None:
    """Refuses layouts that are no DTensors where experts are."""
    if dtensor and parameters != "packed" and not (group in ("local", None) and mesh is None):
        raise ValueError(
            "transformer_plugin::MoE: argument 'parameters': expected 'packed' with experts that are DTensors, "
            f"got {parameters!r}. Pass dtensor=False, and reduce each rank's parameters yourself."
        )


def _check_shares_experts(parallel: TensorParallel | None, group: ProcessGroup | None) -> None:
    """Refuses ranks that have copies of experts and other tokens: their gradients would be partial sums."""
    if parallel is None:
        return
    experts = [] if group is None else torch.distributed.get_process_group_ranks(group)
    if not set(parallel.ranks) <= set(experts):
        raise ValueError(
            "transformer_plugin::MoE: argument 'tp_group': expected ranks that share the experts, got "
            f"{list(parallel.ranks)} with experts on {experts or 'each rank'}. Pass a 'group' of experts that contains "
            "the tensor-parallel ranks."
        )


def _size_of(group: ProcessGroup, dtensor: bool) -> int:
    """The number of ranks. Refuses quantized experts that would be DTensors."""
    if dtensor and chosen_recipe(None) is not None:
        raise ValueError(
            "transformer_plugin::MoE: argument 'dtensor': expected False in quantized_init with a group of several "
            "ranks, as DTensors hold plain tensors only, got True. Pass dtensor=False, and reduce each rank's "
            "parameters yourself."
        )
    return group.size()


class MoE(LayerContainer):
    """A mixture of E experts: each token goes to ``topk`` of them and gets the weighted sum of their outputs.

    With a ``group`` or a ``mesh`` of R ranks each rank holds E / R consecutive experts, and the ranks exchange tokens.
    Without one, or with one rank, nothing is communicated.

    Args:
        hidden: H, the columns of input and output.
        ffn_hidden: F, the hidden columns of one expert.
        num_experts: E, the experts of all ranks together.
        topk: K, the experts of one token.
        group: the ranks that share the experts, a c10d process group of which this rank is a member, or a mesh.
            "local": all experts are on this rank. None has the same effect, but ``torch.distributed.group.WORLD`` is
            also None before ``init_process_group``. So None before that call warns, and raises an error if a launcher
            such as torchrun has started several processes.
        mesh: the ranks as a ``DeviceMesh`` of one dimension, for example ``mesh_2d["experts"]``, instead of a group.
        dtensor: whether experts that are sharded over several ranks are ``DTensor`` s, see below. False: plain tensors
            with this rank's experts, for code that reduces, clips and saves each rank's parameters itself, and for
            :func:`~transformer_plugin.parallel.shard_`, after which state dicts are of all experts.
        router: how tokens choose experts.
        dispatch: how many rows the experts of a rank receive.
        bias: whether the experts' linear layers have biases.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to
            ``reset_parameters()``.
        recipe: the formats of the experts' linear layers. Setting it later sets it in each layer, and changes the
            padding of the experts' rows as the recipe requires.
        activation, glu_interleave, launch_options, parameters, fuse_wgrad_accumulation, delay_wgrad_compute: of the
            experts, as in :class:`GroupedMLP`. With several ranks the layouts ``"list"`` and ``"grouped"`` need
            ``dtensor=False``.
        cache_weights: likewise.
        sequence_parallel: whether the ranks of ``tp_group`` have other tokens of the same sequences, and one loss, see
            :doc:`/tensor-parallel`. These ranks must share the experts. The router's gradient is the sum over them, and
            the auxiliary loss the mean.
        tp_group: with ``sequence_parallel``, a process group or a mesh of one dimension.

    Parameters: ``router.weight [E, H]``, the same on every rank; reduce its gradient as for any replicated parameter.
    And ``experts.*``. With several ranks these are ``DTensor`` s of all experts, ``Shard(0)`` over the mesh, so that
    FSDP2, ``torch.distributed.checkpoint`` and optimizers know that ranks hold different experts; ``to_local()``
    returns this rank's. Their gradients are sums over the tokens of every rank.
    :func:`transformer_plugin.parallel.fully_shard` and :func:`~transformer_plugin.parallel.data_parallel` turn them
    into means, like the gradients of other parameters.

    Under ``torch.autocast`` the tokens are cast before they are sent. The router computes its float32 logits from the
    input before the cast; where that and the router's weight differ in dtype, from both in float32.
    """

    dispatcher: LocalTokenDispatcher | TokenDispatcher
    hidden: int = fixed("hidden")
    ffn_hidden: int = fixed("ffn_hidden")
    num_experts: int = fixed("num_experts")
    group: ProcessGroup | None = fixed("group", lambda moe: moe.dispatcher.group)
    dispatch: DispatchConfig = fixed("dispatch")
    bias: bool = fixed("bias")
    mesh: DeviceMesh | None = fixed("mesh")
    activation: Activation = fixed("activation")
    glu_interleave: int = fixed("glu_interleave", lambda moe: moe.activation.interleave)

    @typed
    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        topk: int,
        *,
        group: ProcessGroup | DeviceMesh | Literal["local"] | None = "local",
        mesh: DeviceMesh | None = None,
        router: RouterConfig = RouterConfig(),  # noqa: B008 frozen
        dispatch: DispatchConfig = DispatchConfig(),  # noqa: B008 frozen
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        dtensor: bool = True,
        activation: str | Activation = "swiglu",
        glu_interleave: int = 0,
        launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
        parameters: Layout = "packed",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        cache_weights: bool = False,
    ) -> None:
        super().__init__()
        parallel = sequence_parallel_group("MoE", tp_group, sequence_parallel)
        _check_types(router, dispatch, recipe, dtype)
        check_sizes("MoE", hidden=hidden, ffn_hidden=ffn_hidden, num_experts=num_experts, topk=topk)
        _check_layout(parameters, dtensor, group, mesh)
        self.hidden, self.ffn_hidden, self.num_experts, self.bias = hidden, ffn_hidden, num_experts, bias
        self.dispatch, self.mesh = dispatch, mesh
        self.activation = chosen_activation(activation, glu_interleave, ffn_hidden)
        ranks, (alignment, multiple) = 1, row_rules(formats_of(recipe))
        found, expert_mesh = group_and_mesh(group, mesh)
        if found is None or found.size() == 1:
            self.dispatcher = LocalTokenDispatcher(num_experts, dispatch, alignment, multiple)
        else:
            ranks = _size_of(found, dtensor)
            place = (dispatch, alignment, multiple, device, dtype or torch.get_default_dtype())
            self.dispatcher = TokenDispatcher(found, num_experts, hidden, topk, *place)
        self.router = TopKRouter(hidden, num_experts, topk, router, device=device, dtype=dtype)
        self.router.tensor_parallel = parallel
        same_on_ranks(self.router)
        _check_shares_experts(parallel, found)
        # Sharded experts are initialized below, when it is known which experts this rank holds.
        first = device if ranks == 1 else "meta"
        of_experts: dict[str, Any] = {"device": first, "dtype": dtype, "recipe": recipe}
        of_experts.update(activation=self.activation, launch_options=launch_options, parameters=parameters)
        of_experts.update(fuse_wgrad_accumulation=fuse_wgrad_accumulation, cache_weights=cache_weights)
        of_experts.update(delay_wgrad_compute=delay_wgrad_compute)
        self.experts = GroupedMLP(num_experts // ranks, hidden, ffn_hidden, bias, **of_experts)
        self._dispatcher_rules = RowRules(alignment, multiple)
        if found is not None and isinstance(self.dispatcher, TokenDispatcher):
            self.experts.to_empty(device=torch.get_default_device() if device is None else device)
            over = (expert_mesh or mesh_of(found, self.dispatcher.context.device)) if dtensor else None
            shard_experts(self.experts, self.router, found, over, len(parallel.ranks) if parallel else 1)
            self.experts.reset_parameters()
            install_wrapper_checks()

    def reset_parameters(self) -> None:
        """Sets fresh initial values. With the same seed on all ranks of a group, all experts differ."""
        for module in (self.router, self.experts):
            _reset(module)
        same_on_ranks(self._unwrapped_router())

    @layer_forward
    def forward(
        self, input: Tensor, *, out: Tensor | None = None, dgrad_out: Tensor | None = None
    ) -> MoEOutput:
        """Runs the mixture. The experts multiply each row by its routing weight.

        Args:
            input: ``[..., H]`` float32, bfloat16 or float16.
            out: memory for the output, contiguous, like ``input`` (under ``torch.autocast`` in its dtype). The output,
                which combining the experts makes, is copied into it, and what is returned is that memory.
            dgrad_out: memory for the gradient of ``input``, likewise, into which it is copied.
        """
        tokens = self._tokens(input)
        router: Any = registered(self, self._modules, "router")
        experts: Any = registered(self, self._modules, "experts")
        self._check_router(router)
        if out is not None:
            check_buffer(class_name(self), "out", out, operand(input))
        if dgrad_out is not None:
            input = with_gradient_into(class_name(self), input, dgrad_out)
            tokens = self._tokens(input)
        if returns_tokens(router):
            routing, tokens = router.route(tokens)
        else:
            routing = router(tokens)
        routed = (operand(tokens), routing.indices, routing.weights)
        output, received = self._aligned_dispatcher(experts).run(experts, *routed)
        if input.dim() != 2:
            output = self._restore_shape(output, input)
        if out is not None:
            output = copied_into(output, out)
        return MoEOutput(output, routing.aux_loss, routing.expert_load, received)

    @property
    def topk(self) -> int:
        """The number of experts per token."""
        return self._unwrapped_router().topk

    @topk.setter
    def topk(self, topk: int) -> None:
        if self.group is not None and topk != self.topk:
            raise ValueError(
                f"transformer_plugin::MoE: attribute 'topk': expected {self.topk}, which all ranks of the group use, "
                f"got {topk}. Make a new layer."
            )
        self._unwrapped_router().topk = topk

    def _unwrapped_router(self) -> TopKRouter:
        """Returns the router inside any wrapper around it."""
        return next(module for module in self.router.modules() if isinstance(module, TopKRouter))

    def _on_recipe_change(self) -> None:
        self._aligned_dispatcher(self.experts)

    def _aligned_dispatcher(self, experts: torch.nn.Module) -> LocalTokenDispatcher | TokenDispatcher:
        """Returns the dispatcher, with the row padding that the experts' formats require.

        Checked in every forward, because recipes may be set in the experts and in their layers.
        """
        rules = row_rules_in(*(experts._layers() if isinstance(experts, GroupedMLP) else (experts,)))
        if rules != self._dispatcher_rules:
            self.dispatcher = self.dispatcher.with_alignment(*rules)
            self._dispatcher_rules = rules
        return self.dispatcher

    @staticmethod
    def _restore_shape(output: Tensor, input: Tensor) -> Tensor:
        """Returns the output in the input's shape, not as a view: pipeline schedules detach outputs in place."""
        if _tracing.is_tracing():  # a trace would record the shape of _unsafe_view as constants
            return output.view(input.shape)
        shaped: Tensor = torch.ops.aten._unsafe_view.default(output, input.shape)
        return shaped

    def _check_router(self, router: torch.nn.Module) -> None:
        """Raises if a replaced router chooses among another number of experts.

        The attribute of a wrapper says nothing: PEFT's wrapper of a parameter has one with another meaning.
        """
        if type(router) is not TopKRouter:
            router = next((module for module in router.modules() if isinstance(module, TopKRouter)), router)
        experts = getattr(router, "num_experts", self.num_experts)
        if experts != self.num_experts:
            raise ValueError(
                f"transformer_plugin::MoE: attribute 'router': expected a router of {self.num_experts} experts, got "
                f"one of {experts}. Make it with num_experts={self.num_experts}, or make a new layer."
            )

    def _tokens(self, input: Tensor) -> Tensor:
        check_dtype("MoE", "input", input, *DTYPES)
        if input.dim() == 0 or input.shape[-1] != self.hidden:
            raise ValueError(
                f"transformer_plugin::MoE: argument 'input': expected a last dimension of {self.hidden} "
                f"(hidden), got {list(input.shape)}. Project the tokens to the hidden size first."
            )
        return input if input.dim() == 2 else input.reshape(-1, self.hidden)

    def extra_repr(self) -> str:
        """The sizes, the activation and the dispatcher."""
        sizes = f"hidden={self.hidden}, ffn_hidden={self.ffn_hidden}, num_experts={self.num_experts}"
        activation = "" if (key := self.activation.key) == "swiglu" else f"activation={key}, "
        return f"{sizes}, {activation}{self.dispatcher}"
