"""The parts of examples/train_moe.py: a byte-level mixture-of-experts language model and its training.

One step: ``data.py`` draws a batch, ``model.py`` runs it (with the mixture of ``transformer_plugin`` or the plain
PyTorch one of ``reference.py``), ``trainer.py`` shards the model with FSDP2, or wraps it with DDP, and runs the
optimizer, ``graph.py`` makes a step one CUDA graph, ``checkpoint.py`` saves with ``torch.distributed.checkpoint``.
"""
