"""Mixed precision in Hugging Face's trainers, if they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin.nn import Linear, MoE

SAMPLES = [{"input_ids": (row := torch.arange(i, i + 16) % 64), "labels": row} for i in range(64)]


class Mixture(torch.nn.Module):
    """Replaces a Llama's feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(64, 32, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).output


def llama(linear: type[torch.nn.Linear]) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Mixture()
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear:
            ours = linear(module.in_features, module.out_features, module.bias is not None)
            ours.load_state_dict(module.state_dict())
            model.set_submodule(name, ours)
    return model


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    losses = []
    for linear in (torch.nn.Linear, Linear):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            bf16=True,
            use_cpu=True,
            per_device_train_batch_size=8,
            max_steps=20,
            logging_steps=5,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(llama(linear), arguments, train_dataset=SAMPLES)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert losses[1][-1] < 0.8 * losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = llama(Linear)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    rows = torch.stack([sample["input_ids"] for sample in SAMPLES[:8]])
    losses = []
    for _ in range(10):
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
