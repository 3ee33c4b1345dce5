"""The experts of Hugging Face transformers, computed by what their class says of itself: one implementation for
:func:`transformer_plugin.nn.convert` and for the name that :mod:`transformer_plugin.integrations.hf` registers.

transformers' decorator ``use_experts_implementation`` gives a class flags (``has_gate``, ``has_bias``,
``is_transposed``, ``is_concatenated``, ``has_post_expert_norm``) and ``_apply_gate``. Nothing here imports it.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.activations import OF_OTHERS, TRAITS
from transformer_plugin.formats import resolve
from transformer_plugin.nn._autocast import as_float32, operand
from transformer_plugin.nn._expert_gates import key_of_gate
from transformer_plugin.nn._formats import DTYPES, RoleFormats, formats_of, row_rules
from transformer_plugin.nn._mlp_arguments import of_slots
from transformer_plugin.nn._module import PluginModule, layer_forward
from transformer_plugin.nn._slots import Slots, SlotsOfRanks
from transformer_plugin.nn._weight_cache import WEIGHT_CACHES, WeightCaches
from transformer_plugin.parallel.token_dispatcher import DispatchConfig, LocalTokenDispatcher, TokenDispatcher
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

_ANY_CAPACITY = DispatchConfig()
_NO_FORMATS = RoleFormats()
#: Where transformers defines the decorator, the forward that it gives a class, and the gate of those without their own.
_DECORATOR = "transformers.integrations.moe"
#: Where the functions are that one op computes with both products.
_ACTIVATIONS = ("torch.nn.modules.activation", "torch.nn.functional", "transformers.activations")


class Flags(NamedTuple):
    """What the decorator says of a class, and what it is where a version of transformers does not say it."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    has_post_expert_norm: bool = False


def flags_of(module: torch.nn.Module) -> Flags:
    """The flags of an experts module."""
    defaults = Flags()
    return Flags(
        getattr(module, "has_gate", defaults.has_gate),
        getattr(module, "has_bias", defaults.has_bias),
        getattr(module, "is_transposed", defaults.is_transposed),
        getattr(module, "is_concatenated", defaults.is_concatenated),
        getattr(module, "has_post_expert_norm", defaults.has_post_expert_norm),
    )


def has_own_gate(module: torch.nn.Module) -> bool:
    """Whether ``_apply_gate`` may be another function than ``act_fn(gate) * up`` of the two halves of the columns."""
    if "_apply_gate" in module.__dict__:
        return True
    gate = getattr(type(module), "_apply_gate", None)
    return gate is not ConvertedExperts._apply_gate and getattr(gate, "__module__", "") != _DECORATOR


def is_one_op(module: torch.nn.Module, flags: Flags) -> bool:
    """Whether one op computes the experts. Asked in every forward, because an activation may be replaced."""
    if flags.has_bias or flags.is_transposed or flags.has_post_expert_norm:
        return False
    return activation_of(module, flags) != ""


def activation_of(module: torch.nn.Module, flags: Flags) -> str:
    """The key of the activation between the two products; "" if no op has it."""
    function = _function(module)
    if flags.has_gate and has_own_gate(module):
        return key_of_gate(module, function)
    known = flags.is_concatenated or not flags.has_gate
    return function if known and _is_function(function, flags) else ""


def not_one_op(module: torch.nn.Module) -> str:
    """Why one op does not compute the experts; "" if it does."""
    flags = flags_of(module)
    if is_one_op(module, flags):
        return ""
    found = {
        "transposed weights": flags.is_transposed,
        "biases": flags.has_bias,
        "a norm of each expert's output": flags.has_post_expert_norm,
    }
    texts = [text for text, is_there in found.items() if is_there]
    if activation_of(module, flags) == "":
        has_own = flags.has_gate and (not flags.is_concatenated or has_own_gate(module))
        activation = f"the activation {_name_of(getattr(module, 'act_fn', None))}"
        texts.append("a gate of its own" if has_own else activation)
    return ", ".join(texts)


def not_computed(module: torch.nn.Module) -> str:
    """Why experts are not computed here; "" if they are. Of modules that are no experts it says so, too."""
    kind: Any = type(module)
    if not hasattr(kind, "_apply_gate"):
        return "its class is not decorated with transformers' use_experts_implementation"
    if getattr(kind.forward, "__globals__", {}).get("__name__") != _DECORATOR:
        return "its forward is not that of transformers' use_experts_implementation"
    flags = flags_of(module)
    names = _weight_names(flags)
    weights = [getattr(module, name, None) for name in names]
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"it has no stack of matrices '{name}'"
        if weight.dtype not in DTYPES:
            return f"its weights are {weight.dtype}"
    first, second = (each.shape[:0:-1] if flags.is_transposed else each.shape[1:] for each in weights)  # type: ignore[union-attr]
    if first[0] != second[1] * (2 if flags.has_gate else 1) or first[1] != second[0]:
        return f"its weights are {list(weights[0].shape)} and {list(weights[1].shape)}"  # type: ignore[union-attr]
    return ""


def run_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    recipe: Recipe | None,
    ranks: TokenDispatcher | None = None,
) -> Tensor:
    """The sum of each token's experts times their routing weights, ``[T, H]`` in the dtype of ``hidden_states``.

    Choices -1 and E, as transformers has them of experts of other ranks, add nothing. The host reads no size. With
    ``ranks`` the module has the experts of this rank, the choices are among those of all ranks, -1 or none, and tokens
    are exchanged.
    """
    flags, formats = flags_of(module), formats_of(recipe)
    tokens, weights = operand(hidden_states), as_float32(top_k_weights)
    own = _dispatcher(module.down_proj.shape[0], formats) if ranks is None else None
    if recipe is not None:
        device = tokens.device
        formats = RoleFormats(resolve(formats.input, device), formats.weight, resolve(formats.grad, device))
    if own is None:
        assert ranks is not None
        output = _over_ranks(module, flags, ranks, tokens, top_k_index, weights, formats)
        return output.to(hidden_states.dtype)
    slots, probs, _ = own.assign(top_k_index, weights)
    if is_one_op(module, flags):
        return _in_one_op(module, flags, tokens, slots, probs, formats).to(hidden_states.dtype)
    rows = ops.permute_rows(tokens, slots.slot, slots.source)
    rows = _one_by_one(module, flags, rows, slots.group_sizes, slots.source, formats)
    return ops.unpermute(rows, slots.slot, slots.source, weights).to(hidden_states.dtype)


def _over_ranks(
    module: Any,
    flags: Flags,
    ranks: TokenDispatcher,
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    formats: RoleFormats,
) -> Tensor:
    """Both exchanges, and this rank's experts between them."""
    plan = ranks.plan(indices)
    if is_one_op(module, flags):
        slots, weights = ranks.context.slots_of(plan, tokens, weights)
        return _in_one_op(module, flags, tokens, slots, weights, formats)
    rows, probs = ranks.context.dispatch(plan, tokens, weights)
    rows = _one_by_one(module, flags, rows, plan.tokens_per_expert, plan.source, formats)
    weighted = (rows.float() * probs[:, None]).to(rows.dtype)
    # Of rows without a token, which have no weight, a module's own function need not be finite.
    return ranks.context.combine(plan, weighted.masked_fill((plan.source < 0)[:, None], 0.0))


def _one_by_one(
    module: Any, flags: Flags, rows: Tensor, group_sizes: Tensor, source: Tensor, formats: RoleFormats
) -> Tensor:
    """Both products, and the module's own functions between and behind them."""
    rows = _product(module, flags, _weight_names(flags)[0], rows, group_sizes, formats)
    rows = module._apply_gate(rows) if flags.has_gate else module.act_fn(rows)
    rows = _product(module, flags, "down_proj", rows, group_sizes, formats)
    if flags.has_post_expert_norm:
        # Rows without a token are zeros, at which a norm need not have a gradient.
        rows = module.post_expert_norm(rows.masked_fill((source < 0)[:, None], 1.0))
    return rows


class ConvertedExperts(PluginModule):
    """The experts of a Hugging Face model, with its parameters and its call, computed by this package.

    ``forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])`` returns ``[T, H]``. The parameters are
    those of the module that was converted: ``gate_up_proj [E, 2F, H]`` and ``down_proj [E, H, F]``, or what else the
    flags of its class say. With an activation that the ops have, no biases and no norm, one op reads the tokens where
    they lie, as in :class:`MoE`, and applies the routing weights between the two products, in float32. Experts of other
    forms get copies of the tokens, and the module's own functions run between the two products. The indices -1
    and E name no expert; other indices that are no expert are an error, as in
    :func:`transformer_plugin.ops.assign_slots`.

    The host reads no group size: there is room for every choice, ``T * K`` rows and padding.
    """

    down_proj: Tensor
    act_fn: Any
    #: the class of before, where the experts have its methods.
    _own_class: Any = None

    @property
    def recipe(self) -> Recipe | None:
        """The formats of both products; may be set."""
        recipe: Recipe | None = self._recipe
        return recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if isinstance(recipe, DelayedScaling):
            refuse_delayed("convert", recipe)
        self._recipe = recipe

    @property
    def cache_weights(self) -> bool:
        """Whether the experts keep their quantized weights, as :attr:`Linear.cache_weights` says; may be set."""
        return caches_weights(self)

    @cache_weights.setter
    def cache_weights(self, caches: bool) -> None:
        set_cache_weights(self, caches)

    @layer_forward
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the tokens through their experts. See the class."""
        return run_experts(self, hidden_states, top_k_index, top_k_weights, self.recipe)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """As the decorator defines it for classes without a gate of their own."""
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self.act_fn(gate) * up
        return product

    def extra_repr(self) -> str:
        """The sizes and the recipe."""
        experts, hidden, ffn_hidden = self.down_proj.shape
        if flags_of(self).is_transposed:
            hidden, ffn_hidden = ffn_hidden, hidden
        return f"num_experts={experts}, hidden={hidden}, ffn_hidden={ffn_hidden}, recipe={self.recipe}"


def converted_class(module: torch.nn.Module) -> type[ConvertedExperts]:
    """The class that experts become: with the methods of their own class where their gate is one of those."""
    return _with_methods_of(type(module)) if has_own_gate(module) else ConvertedExperts


_OWN: dict[Any, type[ConvertedExperts]] = {}


def _with_methods_of(kind: Any) -> type[ConvertedExperts]:
    if kind not in _OWN:
        members = {"_apply_gate": kind._apply_gate, "_own_class": kind, "__reduce_ex__": _reduced}
        members["__doc__"] = ConvertedExperts.__doc__
        _OWN[kind] = type(f"Converted{kind.__name__}", (ConvertedExperts, kind), members)
    return _OWN[kind]


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles, which find a class by its name: this one is made where it is needed."""
    return _without_state, (self._own_class,), dict(self.__dict__)


def _without_state(kind: type[torch.nn.Module]) -> torch.nn.Module:
    converted = _with_methods_of(kind)
    return converted.__new__(converted)


def refuse_delayed(owner: str, recipe: Recipe, where: str = "") -> NoReturn:
    """Raises: experts of transformers have no state of delayed scaling."""
    expected = f"a recipe whose scales come from current values for experts{where}"
    raise ValueError(message(owner, "recipe", expected, str(recipe), "Use Float8CurrentScaling()"))


def _in_one_op(
    module: Any,
    flags: Flags,
    tokens: Tensor,
    slots: Slots | SlotsOfRanks,
    probs: Tensor,
    formats: RoleFormats,
) -> Tensor:
    """Both products, the activation and the sum of each token's rows, as :class:`GroupedMLP` calls them."""
    first, second = (getattr(module, name) for name in _weight_names(flags))
    weights = operand(first), operand(second)
    options: Any = {"activation": activation_of(module, flags), **of_slots(slots)}
    for name, own, weight in zip(("fc1", "fc2"), _weight_names(flags), (first, second), strict=True):
        options[f"quantized_{name}_weight"] = _kept(module, own, weight, formats)
    return ops.grouped_mlp(tokens, *weights, slots.group_sizes, probs, None, None, *formats, **options)


def _product(
    module: Any, flags: Flags, name: str, rows: Tensor, group_sizes: Tensor, formats: RoleFormats
) -> Tensor:
    """Each expert's rows times its matrix, plus its bias. The tail of the rows is zero, and is not read."""
    own = getattr(module, name)
    weight = operand(own)
    bias = operand(getattr(module, f"{name}_bias")) if flags.has_bias else None
    rows = rows.to(weight.dtype)  # autocast computes some functions in float32
    if formats == _NO_FORMATS and flags.is_transposed:  # read where it lies
        return ops.grouped_gemm(rows, weight, group_sizes, bias, transpose_b=False)
    weight = weight.transpose(1, 2) if flags.is_transposed else weight
    kept = _kept(module, name, own, formats, flags.is_transposed)
    return ops.grouped_linear(rows, weight, group_sizes, bias, None, *formats, quantized_weight=kept)


def _kept(
    module: torch.nn.Module, name: str, weight: Tensor, formats: RoleFormats, transposed: bool = False
) -> list[Tensor] | None:
    """The quantized weight of experts that keep it; None if the op is to quantize it."""
    if torch.compiler.is_compiling():
        return None
    caches: WeightCaches | None = module.__dict__.get(WEIGHT_CACHES)
    if caches is None or formats == _NO_FORMATS:
        return None
    return caches.of(name).quantized(module, weight, formats, transposed)


def caches_weights(module: torch.nn.Module) -> bool:
    """Whether experts keep their quantized weights."""
    return WEIGHT_CACHES in module.__dict__


def set_cache_weights(module: torch.nn.Module, caches: bool) -> None:
    """Whether experts keep their quantized weights, and read them again until the weights change."""
    if bool(caches) == caches_weights(module):
        return
    if caches:
        setattr(module, WEIGHT_CACHES, WeightCaches())
    else:
        delattr(module, WEIGHT_CACHES)


def _weight_names(flags: Flags) -> tuple[str, str]:
    return "gate_up_proj" if flags.has_gate else "up_proj", "down_proj"


def _function(module: torch.nn.Module) -> str:
    """The op's name of the activation; "" if it has none."""
    function = getattr(module, "act_fn", None)
    if isinstance(function, torch.nn.Module) and _is_changed(function):
        return ""
    kind: Any = function if isinstance(function, FunctionType) else type(function)
    return OF_OTHERS.get(kind.__name__, "") if kind.__module__ in _ACTIVATIONS else ""


def _is_changed(function: torch.nn.Module) -> bool:
    """Whether hooks, or another forward of its own, see or change what an activation computes."""
    hooks = (function._forward_hooks, function._forward_pre_hooks, function._backward_hooks)
    return any(hooks) or bool(function._backward_pre_hooks) or "forward" in function.__dict__


def _is_function(name: str, flags: Flags) -> bool:
    """Whether an op has the function for experts with a gate, or without one."""
    return name != "" and TRAITS[name].gated == flags.has_gate  # type: ignore[index]


def _name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


def _made(experts: int, formats: RoleFormats) -> LocalTokenDispatcher:
    """A dispatcher for experts and one index more, which transformers gives choices of other ranks' experts."""
    return LocalTokenDispatcher(experts, _ANY_CAPACITY, *row_rules(formats), total_experts=experts + 1)


_cached = cache(_made)


def _dispatcher(experts: int, formats: RoleFormats) -> LocalTokenDispatcher:
    """One for all modules. torch's compiler warns of a cache, into which it does not look."""
    return _made(experts, formats) if torch.compiler.is_compiling() else _cached(experts, formats)
