"""The expert parallelism of transformers through ``ep_implementation="transformer_plugin"``, with FSDP2 and tensor
parallelism, against its stock model in one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.clients.imported import transformers
from transformer_plugin.integrations import hf
from transformer_plugin.integrations._hf_expert_parallel import ExpertsOverRanks
from transformer_plugin.nn import DispatchConfig
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool

TOKENS_IN_WORDS = 64
SIZES = {
    "vocab_size": TOKENS_IN_WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 3,
}
#: One op computes the experts of the first, products around its own functions those of the second.
MODELS = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 48},
    "GptOss": {"num_local_experts": 8, "layer_types": ["full_attention", "sliding_attention"]},
}

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folders of models with random weights, which are large enough for wrong experts to be seen."""
    folders: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in folders:
            folders[name] = str(tmp_path_factory.mktemp(name))
            torch.manual_seed(0)
            module = transformers()
            config = getattr(module, f"{name}Config")(**SIZES, **MODELS[name])
            model = getattr(module, f"{name}ForCausalLM")(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape) / 5)
            model.save_pretrained(folders[name])
        return folders[name]

    return folder


def load(folder: str, **options: Any) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def over_ranks(rank: Rank, folder: str, implementation: str = "transformer_plugin", **sizes: int) -> Any:
    """The model, with its experts over ranks as transformers distributes them."""
    from transformers.distributed import DistributedConfig

    # transformers reads these, which torchrun sets.
    variables = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    config = DistributedConfig(ep_implementation=implementation, **sizes)
    return load(folder, distributed_config=config, experts_implementation="transformer_plugin").to(
        rank.device
    )


def batch(number: int) -> Tensor:
    """The words of one group of data parallelism: another number for each."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(TOKENS_IN_WORDS, (2, 5 + 4 * number), generator=generator)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu() - wanted).abs().max() / wanted.abs().max())


LAYOUTS = [
    pytest.param({"fsdp_size": 2, "ep_size": 2}, id="fsdp2-ep2"),
    pytest.param({"tp_size": 2, "ep_size": 2}, id="tp2-ep2"),
    pytest.param({"fsdp_size": 4, "ep_size": 2}, id="fsdp4-ep2"),
    pytest.param({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, id="fsdp2-tp2-ep4"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_equals_one_process(
    make_pool: Callable[[int, str], RankPool], saved: Folder, name: str, sizes: dict[str, int]
) -> None:
    ranks = sizes.get("fsdp_size", 1) * sizes.get("tp_size", 1)
    make_pool(ranks, "gloo").run(check_equals_one_process, saved(name), "transformer_plugin", sizes)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process_on_gpus(pair_of_gpus: RankPool, saved: Folder, name: str) -> None:
    pair_of_gpus.run(
        check_equals_one_process, saved(name), "transformer_plugin", {"fsdp_size": 2, "ep_size": 2}
    )


def test_all_reduce_of_transformers(make_pool: Callable[[int, str], RankPool], saved: Folder) -> None:
    """Each rank has the tokens of all, and gets the index of no expert for experts of others."""
    sizes = {"tp_size": 2, "ep_size": 2}
    make_pool(2, "gloo").run(check_equals_one_process, saved("Qwen3Moe"), "all_reduce", sizes)


def check_equals_one_process(rank: Rank, folder: str, implementation: str, sizes: dict[str, int]) -> None:
    model = over_ranks(rank, folder, implementation, **sizes)
    groups = sizes.get("fsdp_size", 1)
    batches = [batch(number) for number in range(groups)]
    mine = batches[rank.rank // sizes.get("tp_size", 1)]
    single = load(folder, experts_implementation="eager")
    losses = [single(each, labels=each) for each in batches]
    (sum(each.loss for each in losses) / groups).backward()
    output = model(mine.to(rank.device), labels=mine.to(rank.device))
    output.loss.backward()
    assert relative(output.logits.detach(), single(mine).logits.detach()) < 1e-5
    wanted = dict(single.named_parameters())
    got = dict(model.named_parameters())
    assert got.keys() == wanted.keys()
    for each, parameter in got.items():
        grad, reference = parameter.grad, wanted[each].grad
        assert grad is not None and reference is not None, each
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert relative(whole, reference) < 1e-4, each


def test_a_recipe_reaches_the_experts(make_pool: Callable[[int, str], RankPool], saved: Folder) -> None:
    """And the numbers are those of one process with this recipe."""
    make_pool(2, "gloo").run(check_recipe, saved("Qwen3Moe"))


def check_recipe(rank: Rank, folder: str) -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    single = hf.set_recipe(load(folder, experts_implementation="transformer_plugin"), Float8BlockScaling())
    plain = load(folder, experts_implementation="transformer_plugin")
    model = hf.set_recipe(over_ranks(rank, folder, **sizes), Float8BlockScaling())
    words = batch(rank.rank)
    with torch.no_grad():
        logits = model(words).logits
        assert relative(logits, single(words).logits) < 1e-5
        assert relative(logits, plain(words).logits) > 1e-3


def test_the_most_tokens(make_pool: Callable[[int, str], RankPool], saved: Folder) -> None:
    make_pool(2, "gloo").run(check_the_most_tokens, saved("Qwen3Moe"))


def check_the_most_tokens(rank: Rank, folder: str) -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    model = over_ranks(rank, folder, **sizes)
    words = torch.zeros(1, 9 + 8 * rank.rank, dtype=torch.int64)
    with torch.no_grad():
        model(words)
        # 17 tokens are the most of the ranks, rounded up to 32.
        model(torch.zeros(1, 32, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"expected at most 32 tokens, got 33\. .*hf\.set_dispatch"):
            model(torch.zeros(1, 33, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="expected a model before its first forward"):
            hf.set_dispatch(model, DispatchConfig(max_tokens=64))
        model = hf.set_dispatch(over_ranks(rank, folder, **sizes), DispatchConfig(max_tokens=40))
        model(words)
        model(torch.zeros(1, 40, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"expected at most 40 tokens, got 41\."):
            model(torch.zeros(1, 41, dtype=torch.int64))
    dist.barrier(group=rank.group)


def test_ranks_with_other_lengths_in_each_call(
    make_pool: Callable[[int, str], RankPool], saved: Folder
) -> None:
    """As with generation: a long call, then one word at a time; a rank without words too."""
    make_pool(2, "gloo").run(check_other_lengths, saved("GptOss"))


def check_other_lengths(rank: Rank, folder: str) -> None:
    model, single = over_ranks(rank, folder, fsdp_size=2, ep_size=2), load(folder)
    with torch.no_grad():
        for count in (20, 1, 3):
            words = batch(rank.rank)[:, : count + rank.rank]
            assert relative(model(words).logits, single(words).logits) < 1e-5
        of_ranks, alone = (
            next(each for each in one.modules() if hasattr(each, "_apply_gate")) for one in (model, single)
        )
        generator = torch.Generator().manual_seed(rank.rank)
        count = 4 * rank.rank
        tokens, weights = torch.randn(count, 32, generator=generator), torch.rand(count, 3)
        index = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(4)])[:count]
        output = of_ranks(tokens, index, weights)
        assert output.shape == (count, 32)
        assert rank.rank == 0 or relative(output, alone(tokens, index, weights)) < 1e-5


def test_no_copy_calls_the_experts_of_another_model(
    make_pool: Callable[[int, str], RankPool], saved: Folder
) -> None:
    make_pool(2, "gloo").run(check_copies, saved("Qwen3Moe"))


def check_copies(rank: Rank, folder: str) -> None:
    model = over_ranks(rank, folder, tp_size=2, ep_size=2)
    experts = next(each for each in model.modules() if hasattr(each, "_apply_gate"))
    with pytest.raises(TypeError, match="expected a model whose experts are not over ranks"):
        copy.deepcopy(experts)


def test_a_model_without_ranks(saved: Folder) -> None:
    with pytest.raises(
        ValueError, match=r"expected a model whose distributed_config .*got Qwen3MoeForCausalLM"
    ):
        hf.set_dispatch(load(saved("Qwen3Moe")), DispatchConfig(max_tokens=4))
    with pytest.raises(TypeError, match="argument 'dispatch'"):
        hf.set_dispatch(load(saved("Qwen3Moe")), 4)  # type: ignore[arg-type]


def test_experts_of_other_kinds() -> None:
    mesh: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=r"got Linear: its class is not decorated .*'all_to_all'"):
        ExpertsOverRanks(torch.nn.Linear(2, 2), mesh, mesh)
