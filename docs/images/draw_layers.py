"""Draws docs/images/layers.svg, what stands on what: `python docs/images/draw_layers.py`."""

from __future__ import annotations

from pathlib import Path

from draw_formats import BLUE, DARK, GREY, LIGHT, PADDING, rect, text

WIDTH, LEFT, ROW, GAP = 900, 12, 62, 14
#: From the top: boxes of a layer, each with its share of the width, title, contents and colour.
LAYERS: list[list[tuple[float, str, str, str]]] = [
    [(1, "your training", "PyTorch, FSDP2, DDP, Megatron-LM, torchtitan", PADDING)],
    [
        (0.5, "modules: tp.nn", "Linear, GroupedLinear, GroupedMLP, MoE; a recipe", LIGHT),
        (0.34, "ranks: tp.parallel", "experts, sharded weights, tensor parallel", LIGHT),
        (0.16, "tp.optim", "Muon", LIGHT),
    ],
    [(1, "functions: tp.quantize, tp.grouped_gemm, ...", "over QuantizedTensor and GroupedTensor", LIGHT)],
    [(1, "ops: torch.ops.transformer_plugin", "schemas, checks, Meta and Autograd in C++", DARK)],
    [
        (0.28, "CPU kernels", "quantized bytes as on a GPU", LIGHT),
        (0.36, "CUDA kernels", "Hopper (sm_90a); generic ones", LIGHT),
        (0.36, "between ranks", "Gloo, NCCL, memory of peer GPUs", LIGHT),
    ],
]


def draw() -> str:
    height = 2 * LEFT + len(LAYERS) * (ROW + GAP) - GAP
    parts = []
    for i, layer in enumerate(LAYERS):
        x, y = float(LEFT), LEFT + i * (ROW + GAP)
        room = WIDTH - 2 * LEFT - (len(layer) - 1) * GAP
        for share, title, contents, fill in layer:
            width, middle = share * room, x + share * room / 2
            stroke = GREY if fill == PADDING else BLUE
            parts += [rect(x, y, width, ROW, fill, stroke), text(middle, y + 26, title, size=14)]
            parts.append(text(middle, y + 46, contents, "#444", 12))
            x += width + GAP
    style = 'font-family="DejaVu Sans, Arial, sans-serif"'
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    body = "\n".join([f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    (Path(__file__).parent / "layers.svg").write_text(draw())
