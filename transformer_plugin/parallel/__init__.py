"""Layers' view of the ranks: who shares what, and how it travels."""

from transformer_plugin.parallel.expert import EpConfig, EpContext, EpPlan
from transformer_plugin.parallel.facade import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
)

__all__ = [
    "EpBuffer",
    "EpConfig",
    "EpContext",
    "EpPlan",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "is_ep_bootstrapped",
]
