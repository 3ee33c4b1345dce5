"""The expert parallelism of Hugging Face transformers over this package's exchange."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin.integrations._hf_recipe import recipe_of
from transformer_plugin.nn._autocast import operand
from transformer_plugin.nn._experts import not_computed, run_experts
from transformer_plugin.nn._formats import formats_of, row_rules
from transformer_plugin.parallel._collectives import all_gather_value, torch_collectives
from transformer_plugin.parallel.token_dispatcher import DispatchConfig, TokenDispatcher
from transformer_plugin.recipes import Recipe
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OP = "integrations.hf"
#: The attribute of an experts module that has its implementation.
ATTRIBUTE = "_transformer_plugin_ranks"


class ExpertsOverRanks:
    """How the experts of one module get the tokens of all ranks: transformers makes one where it applies its plan, and
    calls it in the module's forward.

    The exchange is made in the first call, which is collective: sizes are those of :attr:`config`, or of that call.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        reason = not_computed(experts)
        if reason:
            expected = "experts that transformer_plugin computes"
            advice = "Use another ep_implementation, such as 'all_to_all'"
            got = f"{type(experts).__name__}: {reason}"
            raise ValueError(message(_OP, "ep_implementation", expected, got, advice))
        self.experts, self.tp_mesh, self.group = experts, tp_mesh, ep_mesh.get_group()
        self.num_experts: int = experts.num_experts * ep_mesh.size()
        self.config = DispatchConfig()
        self.dispatcher: TokenDispatcher | None = None
        self.rules: Any = None
        setattr(experts, ATTRIBUTE, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of each token's experts of all ranks, ``[T, H]``; the arguments are those of the experts."""
        count, over_tp = hidden_states.shape[0], self.tp_mesh.size() > 1
        if over_tp:  # these ranks have the same tokens, and each sends a part of them
            inputs = (hidden_states, top_k_index, top_k_weights)
            hidden_states, top_k_index, top_k_weights = (self._part_of(each) for each in inputs)
        recipe = recipe_of(self.experts)
        dispatcher = self._dispatcher(hidden_states, top_k_index.shape[1], recipe)
        output = run_experts(self.experts, hidden_states, top_k_index, top_k_weights, recipe, dispatcher)
        return self._whole(output, count) if over_tp else output

    def _dispatcher(self, tokens: Tensor, topk: int, recipe: Recipe | None) -> TokenDispatcher:
        rules = row_rules(formats_of(recipe))
        if self.dispatcher is None:
            self.dispatcher = self._made(operand(tokens), topk, rules)
            self.rules = rules
        if rules != self.rules:
            self.dispatcher, self.rules = self.dispatcher.with_alignment(*rules), rules
        bound = self.dispatcher.context.config.max_tokens_per_rank
        if tokens.shape[0] > bound:
            advice = (
                "On every rank, before the first forward, call transformer_plugin.integrations.hf.set_dispatch(model, "
                "transformer_plugin.nn.DispatchConfig(max_tokens=the largest number of tokens of a rank))"
            )
            raise ValueError(
                message(_OP, "hidden_states", f"at most {bound} tokens", str(tokens.shape[0]), advice)
            )
        return self.dispatcher

    def _made(self, tokens: Tensor, topk: int, rules: tuple[int, int]) -> TokenDispatcher:
        """The exchange. Collective."""
        if torch.compiler.is_compiling():
            expected = "a first forward that is not compiled, in which the ranks make their exchange"
            raise RuntimeError(
                message(_OP, "model", expected, "a compiled one", "Call the model once before compiling")
            )
        config = self.config
        if config.max_tokens is None:
            config = replace(config, max_tokens=self._tokens_of_ranks(tokens))
        hidden = tokens.shape[1]
        place = (config, *rules, tokens.device, tokens.dtype)
        return TokenDispatcher(self.group, self.num_experts, hidden, topk, *place)

    def _tokens_of_ranks(self, tokens: Tensor) -> int:
        """The most tokens of any rank in this call, rounded up to a power of two: other calls have other lengths."""
        counts = all_gather_value(_OP, "max_tokens", tokens.shape[0], self.group)
        return 1 << (max(*counts, 1) - 1).bit_length()

    def _part_of(self, tensor: Tensor) -> Tensor:
        """This rank's rows, of those that all ranks of its group of tensor parallelism have. Its backward gathers."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        with self._over_tp():
            return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _whole(self, output: Tensor, count: int) -> Tensor:
        """The rows of all of them."""
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((count, output.shape[1]))
        parts = DTensor.from_local(
            output.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(output.shape[1], 1)
        )
        with self._over_tp():
            return parts.full_tensor()

    def _over_tp(self) -> AbstractContextManager[None]:
        """Around collectives of torch, whose errors of a lost rank then name it. Compiled code has no such errors."""
        compiled = torch.compiler.is_compiling()
        return nullcontext() if compiled else torch_collectives(_OP, "tokens", self.tp_mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises: the forward that transformers gave the module would call the original's experts."""
        expected = "a model whose experts are not over ranks when it is copied"
        advice = "Load the model a second time in place of copying it"
        raise TypeError(message(_OP, "model", expected, "one whose experts are", advice))
