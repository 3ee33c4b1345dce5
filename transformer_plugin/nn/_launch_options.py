"""Modules that contain grouped layers and share one value of launch options among them."""

from __future__ import annotations

from transformer_plugin._arguments import class_name
from transformer_plugin.launch import LaunchOptions, checked
from transformer_plugin.nn._attributes import SharedRecipeModule
from transformer_plugin.nn._delayed_wgrad import DelayedWgradContainer
from transformer_plugin.nn.grouped_linear import GroupedLinear


class LaunchOptionsMixin(DelayedWgradContainer, SharedRecipeModule):
    """A module whose ``launch_options`` get and set those of all its grouped layers."""

    @property
    def launch_options(self) -> LaunchOptions:
        """The launch options of the grouped layers. Setting them sets those of every layer; reading them raises a
        ValueError if the layers have different ones."""
        found = {layer.launch_options for layer in self.modules() if isinstance(layer, GroupedLinear)}
        if len(found) > 1:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute 'launch_options': expected the same in all "
                f"layers, got {sorted(found)}. Read those of each layer."
            )
        return found.pop() if found else LaunchOptions()

    @launch_options.setter
    def launch_options(self, options: LaunchOptions) -> None:
        checked(options, class_name(self))
        for layer in self.modules():
            if isinstance(layer, GroupedLinear):
                layer.launch_options = options
