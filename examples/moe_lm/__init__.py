"""The parts of examples/train_moe.py: a byte-level mixture-of-experts language model and its training.

One step: ``data.py`` draws a batch, ``model.py`` runs it (feed-forward from ``transformer_plugin``, or in
plain PyTorch from ``reference.py``), ``trainer.py`` shards it with FSDP2 and takes the optimizer's step,
``checkpoint.py`` saves with ``torch.distributed.checkpoint``.
"""
