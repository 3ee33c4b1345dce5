"""Describes a recipe on a device in words: which kernels run, and with which numbers."""

from __future__ import annotations

import torch

from transformer_plugin._arguments import typed
from transformer_plugin.formats import Format
from transformer_plugin.ops.expert_parallel import select_transport
from transformer_plugin.ops.gemm_plan import GroupedGemmPlan, grouped_gemm_plan
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

#: the compute capability for which the kernels are built and on which they are tested.
TESTED = (9, 0)
#: the width of the layers whose products are described.
WIDTH = 2048


@typed
def explain_support(recipe: Recipe | None, device: torch.device | str) -> str:
    """Describes which kernels run if ``recipe`` is used on ``device``, and why. Allocates nothing, launches no kernel.

    Args:
        recipe: the recipe of a module; None for unchanged operands.
        device: ``"cpu"``, or a CUDA device (reading its name starts its context). For other device types the answer is
            that nothing runs there.

    Returns:
        One line each: the device, the formats of the three operands, quantization, experts, how a layer of experts
        reads its tokens, how tokens move between ranks, which recipe is faster, if that was measured on such a device;
        widths whose products are slower; then the products.

    Raises:
        TypeError: ``recipe`` is neither None nor a Recipe.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            "transformer_plugin.explain_support: argument 'recipe': expected a Recipe or None, got "
            f"{type(recipe).__name__}. Use transformer_plugin.recipes.recipe_from_name to get one from a name."
        )
    device = torch.device(device)
    used = recipe if recipe is not None else Recipe()
    keys = (used.input_format, used.weight_format, used.grad_format)
    formats = [Format.parse(key) for key in keys]
    name = "no recipe" if recipe is None else type(recipe).__name__
    lines = [f"{name} on {device}: {_where(device)}"]
    if device.type not in ("cpu", "cuda") or not _has_kernels(device):
        return lines[0]
    lines.append("formats: input {}, weight {}, gradient {}".format(*keys))
    if formats[0].is_quantized:
        lines.append(
            "quantization: this package's kernels, the same bytes on CPU and CUDA" + _conditions(formats)
        )
    if isinstance(recipe, DelayedScaling):
        lines.append(
            f"scales: from the largest amax of {recipe.amax_history_len} steps"
            if recipe.amax_compute_algo == "max"
            else "scales: from the amax of the previous step"
        )
        lines[-1] += f", divided by 2^{recipe.margin}" if recipe.margin else ""
        lines[-1] += "; each tensor is read once, and the module's buffers keep the state"
    lines.append("experts: " + _experts(recipe))
    lines.append("tokens: " + _tokens(recipe, formats, device))
    lines.append("between ranks: " + _ranks(device))
    speed = _speed(recipe, device)
    if speed:
        lines.append("speed: " + speed)
    if device.type == "cuda":
        lines += _slower_widths(formats, device)
    lines.append("products: " + _products(formats, device))
    return "\n".join(lines)


def _conditions(formats: list[Format]) -> str:
    """Describes the required sizes of the operands, and what is random."""
    if formats[0].family == "mxfp8":
        return "; widths must be multiples of 32"
    if formats[0].family == "nvfp4":
        text = "; widths, and for the backward the rows (of each group), must be multiples of 16"
        random = formats[2].stochastic_rounding
        return text + ("; gradients are rounded at random, seeded by torch's generator" if random else "")
    return ""


def _experts(recipe: Recipe | None) -> str:
    """Says what decides whether a GroupedMLP runs as one op."""
    if isinstance(recipe, DelayedScaling):
        return "GroupedMLP calls its two layers, whose scales are updated one after the other"
    return (
        "GroupedMLP runs both products as one op, while no hook or other forward needs a tensor between them"
    )


def _tokens(recipe: Recipe | None, formats: list[Format], device: torch.device) -> str:
    """Says whether MoE copies the rows of each expert."""
    copied = "MoE copies the rows of each expert first"
    if device.type == "cpu" or _capability(device) != TESTED or isinstance(recipe, DelayedScaling):
        return copied
    input, _, grad = formats
    if any(format.nonfinite_is_nan for format in (input, grad)):
        return copied + ", as an option `nan` needs them"
    if not input.is_quantized:
        return (
            "MoE reads 16-bit tokens by an index where widths are multiples of 8; rows are copied first for weight "
            "gradients (fc2: with more than 1024 features), other widths and dtypes, and hooks of its layers"
        )
    if input.family in ("fp8_tensor", "fp8_block"):
        return (
            "MoE quantizes 16-bit tokens by an index where widths are multiples of 8; for other widths and dtypes, "
            "and hooks of its layers, rows are copied first"
        )
    return copied


def _ranks(device: torch.device) -> str:
    """Says how the tokens of a MoE over a group of ranks travel."""
    transport, reason = select_transport(2, device.type, peer_memory=False)
    text = f"the transport {transport} moves tokens, by {reason}"
    if device.type != "cuda":
        return text
    transport, reason = select_transport(2, device.type, peer_memory=True)
    return (
        f"where the GPUs of all ranks reach each other's memory, as over NVLink in one host, the transport {transport} "
        f"moves tokens, by {reason}; elsewhere {text}"
    )


def _speed(recipe: Recipe | None, device: torch.device) -> str:
    """Recommends the fastest recipe. What was measured: docs/moe-layer.md. Empty for devices without a measurement."""
    if device.type == "cpu":
        if recipe is None:
            return "no recipe that quantizes is faster on a CPU"
        keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
        if not any(Format.parse(key).is_quantized for key in keys):
            return ""
        return (
            "no recipe is faster on a CPU, where operands are dequantized; a recipe shows its numbers there"
        )
    if _capability(device) != TESTED:
        return ""
    where = "on Hopper for expert layers of thousands of tokens, forward and backward"
    once = "if quantize_weights() is called once for several micro-batches"
    if isinstance(recipe, Float8BlockScaling):
        return f"the fastest recipe, or within 5 % of it, {where}, {once}"
    if isinstance(recipe, Float8CurrentScaling):
        return f"Float8BlockScaling is as fast or faster (within 5 %) {where}"
    return f"Float8BlockScaling is faster {where}, {once}"


def _has_kernels(device: torch.device) -> bool:
    key = "CUDA" if device.type == "cuda" else "CPU"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("transformer_plugin::quantize", key))


def _where(device: torch.device) -> str:
    if device.type == "cpu":
        return "complete, forward and backward"
    if device.type != "cuda":
        return "this package does not run there; use a CPU or a CUDA device"
    if not _has_kernels(device):
        return "this build has no CUDA kernels; build with nvcc and a CUDA build of torch"
    if not torch.cuda.is_available():
        return "complete, forward and backward, but torch finds no CUDA device here"
    major, minor = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if (major, minor) == TESTED:
        return f"complete, forward and backward, on {gpu}"
    return f"{gpu} is untested; the kernels are built for sm_90a unless TORCH_CUDA_ARCH_LIST was set in the build"


def _products(formats: list[Format], device: torch.device) -> str:
    if device.type == "cpu":
        return _products_on_cpu(formats)
    input, weight, grad = (f.key if f.is_quantized else "none" for f in formats)
    pairs = {"forward": (input, weight), "data_grad": (grad, weight), "weight_grad": (grad, input)}
    if not formats[0].traits.has_group_columns:  # from the operands before quantization
        pairs["weight_grad"] = ("none", "none")
    lines = [_product(product, *keys, device) for product, keys in pairs.items()]
    return "FP32 sums, rounded once\n" + "\n".join(lines)


def _products_on_cpu(formats: list[Format]) -> str:
    value = "FP32 sums, rounded once"
    if not formats[0].is_quantized:
        return f"torch's kernels in the dtype of the operands; {value}"
    exact = all(f.power_of_two_scales for f in formats)
    how = "exactly to bfloat16" if exact else "to float32"
    if not formats[0].traits.has_group_columns:
        how += " (those of weight gradients are not quantized)"
    return f"operands are dequantized {how} and multiplied by torch's kernels; {value}: correct, slower than no recipe"


def _slower_widths(formats: list[Format], device: torch.device) -> list[str]:
    """Describes the forward of a layer with a width that other kernels compute; empty if there is no such width."""
    a, b = (f.key if f.is_quantized else "none" for f in formats[:2])
    # The next width that the formats take.
    width = WIDTH + {"mxfp8": 32, "nvfp4": 16}.get(formats[0].family, 1)
    plan = _plan("forward", a, b, device, width)
    if plan.backend == _plan("forward", a, b, device).backend:
        return []
    return [f"widths such as {width}: {_BACKENDS[plan.backend]} ({plan.reason})"]


def _plan(product: str, a: str, b: str, device: torch.device, width: int = WIDTH) -> GroupedGemmPlan:
    """What runs for a product of typical sizes."""
    bfloat16, (major, minor) = torch.bfloat16, _capability(device)
    sizes, capability = (8192, 8, width, width, 132), 10 * major + minor
    return grouped_gemm_plan(
        product, bfloat16, bfloat16, *sizes, a_format=a, b_format=b, capability=capability
    )


def _product(product: str, a: str, b: str, device: torch.device) -> str:
    """Describes one product of typical sizes, from :func:`~transformer_plugin.ops.grouped_gemm_plan`."""
    plan = _plan(product, a, b, device)
    return f"  {product}: {_BACKENDS[plan.backend]}{_how(plan.backend, a)} ({plan.reason})"


def _capability(device: torch.device) -> tuple[int, int]:
    """That of the GPU; without one, that of the GPU that the kernels are made for."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else TESTED


_BACKENDS = {
    "sm90": "this package's Hopper kernels",
    "generic": "this package's kernels for any GPU",
    "torch": "torch._grouped_mm",
    "steps": "operands are dequantized, then multiplied as without a recipe",
}


def _how(backend: str, key: str) -> str:
    if backend != "sm90" or key == "none":
        return ""
    if Format.parse(key).family in ("mxfp8", "nvfp4"):
        return ", which dequantize to bfloat16, because Hopper has no instructions for this format"
    return " on FP8 tensor cores; after every 128 products the partial sum is added in FP32"
