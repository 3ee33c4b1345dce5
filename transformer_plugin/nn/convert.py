"""convert: a model of another library computes its linear layers and experts with the kernels of this one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin._arguments import typed
from transformer_plugin.functional import grouped_mlp
from transformer_plugin.nn._autocast import operand
from transformer_plugin.nn._formats import formats_of, row_rules, width_multiple
from transformer_plugin.nn._left_alone import chooses, is_experts, is_linear, left_alone
from transformer_plugin.nn._module import PluginModule, layer_forward
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn.linear import Linear
from transformer_plugin.nn.quantized_parameters import refused_recipe
from transformer_plugin.parallel.token_dispatcher import DispatchConfig, LocalTokenDispatcher
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

#: Classes of Hugging Face transformers, version 5, whose forward is what :class:`ConvertedExperts` computes.
EXPERTS = (
    *("DeepseekV2Experts", "DeepseekV3Experts", "Glm4MoeExperts", "MixtralExperts"),
    *("OlmoeExperts", "Qwen2MoeExperts", "Qwen3MoeExperts", "Qwen3NextExperts"),
)


class ConvertedExperts(PluginModule):
    """The experts of a Hugging Face model, with its parameters and its call, computed by this package.

    ``forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])`` returns ``[T, H]``. Parameters:
    ``gate_up_proj [E, 2F, H]``, the gate first, and ``down_proj [E, H, F]``, those of the module that was converted.
    Routing weights are applied between the two products, in float32. The indices -1 and E name no expert; other indices
    that are no expert are an error, as in :func:`transformer_plugin.ops.assign_slots`.

    The host reads no group size: there is room for every choice, ``T * K`` rows and padding.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    @property
    def recipe(self) -> Recipe | None:
        """The formats of both products; may be set."""
        recipe: Recipe | None = self._recipe
        return recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if isinstance(recipe, DelayedScaling):
            _refuse(
                "recipe",
                "a recipe whose scales come from current values",
                recipe,
                "Use Float8CurrentScaling()",
            )
        self._recipe = recipe
        experts = self.gate_up_proj.shape[0]
        # Under expert parallelism transformers gives choices of other ranks' experts the index `experts`.
        rules = row_rules(formats_of(recipe))
        self._dispatcher = LocalTokenDispatcher(experts, DispatchConfig(), *rules, total_experts=experts + 1)

    @layer_forward
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the tokens through their experts. See the class."""
        tokens = operand(hidden_states)
        received = self._dispatcher.dispatch(tokens, top_k_index, top_k_weights.float())
        weights = (operand(self.gate_up_proj), operand(self.down_proj))
        rows = grouped_mlp(received.rows, *weights, received.group_sizes, received.probs, recipe=self.recipe)
        output: Tensor = self._dispatcher.combine(rows, received)
        return output.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """The sizes and the recipe."""
        experts, hidden, ffn_hidden = self.down_proj.shape
        return f"num_experts={experts}, hidden={hidden}, ffn_hidden={ffn_hidden}, recipe={self.recipe}"


@typed
def convert(
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Makes layers of a model compute with this package, in place. Parameters stay the same objects: nothing is copied.

    Every ``torch.nn.Linear`` becomes a :class:`Linear` with the recipe, and the experts of the Hugging Face models in
    ``transformer_plugin.nn.convert.EXPERTS`` become :class:`ConvertedExperts`. Modules of this package get the recipe.
    Names of parameters, the ``state_dict``, hooks and references to the modules stay as they are.

    Other modules are left as they are. For each class of those that multiply by weights of their own there is one
    ``UserWarning`` with their number: experts of other classes, subclasses of ``torch.nn.Linear``, quantized linear
    layers, ``Conv1D`` of Hugging Face, ``torch.nn.MultiheadAttention`` and recurrent layers. There is also one if no
    layer is converted. Routers, embeddings, convolutions and norms are left without a word, and so is what ``filter``
    leaves out. Experts that are a list of modules are converted layer by layer.

    In evaluation torch runs a ``torch.nn.TransformerEncoderLayer`` as one fused kernel, which reads weights and no
    recipe. With converted layers in it, it calls them as in training, and takes no nested tensors. Where a layer is put
    into one in another way, call ``torch.backends.mha.set_fastpath_enabled(False)``. Other modules that read the weight
    of a layer, and do not call the layer, compute without its recipe.

    Args:
        model: any module.
        recipe: of :mod:`transformer_plugin.recipes`; None changes no number format.
        filter: called with a module and its name; the module is converted where it returns True. For example
            ``lambda module, name: name != "lm_head"``. None converts all. It is also called with the modules that a
            warning would name, and silences it where it returns False.

    Returns:
        The model.

    Raises:
        TypeError: no module, no recipe. ValueError: a layer whose widths the recipe does not take, or whose forward was
        replaced on the instance; experts with ``DelayedScaling`` or another activation than SiLU. No layer is converted
        then.
    """
    if not isinstance(model, torch.nn.Module):
        _refuse("model", "a torch.nn.Module", type(model).__name__, "Pass the model", TypeError)
    if recipe is not None and not isinstance(recipe, Recipe):
        advice = "Make one, or call transformer_plugin.recipes.recipe_from_name()"
        _refuse("recipe", "a recipe of transformer_plugin.recipes or None", repr(recipe), advice, TypeError)
    kinds = [(name, module, _kind(module)) for name, module in model.named_modules()]
    convertible = [(name, module, kind) for name, module, kind in kinds if kind is not None]
    chosen = [each for each in convertible if filter is None or filter(each[1], each[0])]
    for name, module, kind in chosen:
        _check(name, module, kind, recipe)
    for _, module, kind in chosen:
        if kind is not RecipeModule:
            module.__class__ = kind
        module.recipe = recipe
    _keep_from_fused_kernel(model)
    for text in _left_as_they_are(kinds, filter):
        warnings.warn(text, UserWarning, stacklevel=3)  # of the caller of the decorated function
    if not chosen:
        got = f"a filter that takes none of {len(convertible)}" if filter and convertible else "none"
        text = "Nothing is converted: pass a model with such layers, or another filter"
        text = message("convert", "model", "layers that can be converted", got, text)
        warnings.warn(text, UserWarning, stacklevel=3)  # of the caller of the decorated function
    return model


def _keep_from_fused_kernel(model: torch.nn.Module) -> None:
    """Encoder layers of torch call the layers of this package in them, in evaluation too.

    torch asks these attributes whether its kernel has what a layer computes; nothing else reads them.
    """
    changed: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and _has_own(module):
            module.activation_relu_or_gelu = 0  # an activation that the kernel does not have
            changed.add(module)
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and not changed.isdisjoint(module.layers):
            module.use_nested_tensor = False  # it would make nested tensors, which the kernel alone takes


def _has_own(module: torch.nn.Module) -> bool:
    return any(isinstance(part, PluginModule) for part in module.modules())


def _left_as_they_are(
    kinds: list[tuple[str, torch.nn.Module, Any]], filter: Callable[[torch.nn.Module, str], bool] | None
) -> Iterator[str]:
    """A text for each class of modules that are not converted, although they multiply by weights of their own."""
    others = [(name, module) for name, module, kind in kinds if kind is None]
    for expected, found in (
        (
            "experts of a class in transformer_plugin.nn.convert.EXPERTS",
            [o for o in others if is_experts(*o)],
        ),
        ("linear layers of the class torch.nn.Linear itself", [o for o in others if is_linear(o[1])]),
    ):
        found = [(name, module) for name, module in found if chooses(filter, module, name)]
        for left in left_alone(found):
            advice = (
                "They stay as they are, without the recipe: leave them out with 'filter' if that is meant"
            )
            yield message("convert", "model", expected, str(left), advice)


def _kind(module: torch.nn.Module) -> type[Any] | None:
    """What a module becomes; RecipeModule for those that have a recipe already; None for those that stay."""
    if type(module) is torch.nn.Linear:
        return Linear
    if isinstance(module, RecipeModule | ConvertedExperts):
        return RecipeModule
    of_transformers = type(module).__module__.startswith("transformers.models.")
    return ConvertedExperts if of_transformers and type(module).__name__ in EXPERTS else None


def _check(name: str, module: torch.nn.Module, kind: type[Any], recipe: Recipe | None) -> None:
    """Raises if a layer cannot be converted."""
    where = f" of layer '{name}'" if name else ""
    if "forward" in module.__dict__:
        advice = "Remove what replaced it first, or leave the layer out with 'filter'"
        _refuse("model", f"the forward of {type(module).__name__}{where}", "one that was replaced", advice)
    text = refused_recipe(module, recipe)
    if text:
        raise ValueError(f"transformer_plugin::convert: argument 'recipe': {text} It is layer '{name}'.")
    multiple = max(width_multiple(key) for key in formats_of(recipe))
    for weight in (p for _, p in module.named_parameters(recurse=False) if p.dim() > 1):
        if any(width % multiple for width in weight.shape[-2:]):
            expected = f"widths{where} that are multiples of {multiple}, as {recipe} needs"
            _refuse("recipe", expected, list(weight.shape), "Leave the layer out with 'filter'")
    if isinstance(recipe, DelayedScaling) and (
        kind is ConvertedExperts or isinstance(module, ConvertedExperts)
    ):
        expected = f"a recipe whose scales come from current values for experts{where}"
        _refuse("recipe", expected, recipe, "Use Float8CurrentScaling()")
    if kind is ConvertedExperts:
        _check_experts(where, module)


def _check_experts(where: str, module: torch.nn.Module) -> None:
    """Raises for experts that :class:`ConvertedExperts` does not compute."""
    activation = type(getattr(module, "act_fn", None)).__name__
    arguments = list(inspect.signature(type(module).forward).parameters)
    if activation not in ("SiLU", "SiLUActivation") or arguments[1:] != [
        "hidden_states",
        "top_k_index",
        "top_k_weights",
    ]:
        got = f"act_fn={activation}, forward({', '.join(arguments[1:])})"
        expected = f"experts{where} with SiLU, called with hidden_states, top_k_index and top_k_weights"
        _refuse("model", expected, got, "Leave them out with 'filter', or use transformers 5")


def _refuse(
    argument: str, expected: str, got: object, advice: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(message("convert", argument, expected, str(got), advice))
