"""Finds the eviction policy that a setting names: one of our own, or the operator's."""

from __future__ import annotations

import importlib

from kvtier.core.policies import POLICIES, MakePolicy
from kvtier.core.pool import Policy
from kvtier.errors import ConfigError

METHODS = ("__len__", "__contains__", "add", "discard", "forget", "touch", "use", "victim")
"""What a policy of the operator's own has to have: those of `kvtier.core.pool.Policy`."""


def load_policy(name: str) -> MakePolicy:
    """The policy that `eviction_policy` names, checked by making one for a single slot.

    Args:
        name: one of `POLICIES`, or `package.module:Class`.

    Raises:
        ConfigError: it cannot be imported or made, or lacks a method.
    """
    if (built_in := POLICIES.get(name)) is not None:
        return built_in
    module_name, _, attribute = name.partition(":")
    setting = f"eviction_policy = {name!r}"
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # a foreign module may raise anything
        raise ConfigError(
            f"{setting} cannot be imported ({error!r}): write 'package.module:Class', and install "
            "its package in this environment"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(
            f"{setting} names no class: the module {module_name!r} has no {attribute!r} that can "
            "be called with the number of slots"
        )
    try:
        policy: object = found(1)
    except Exception as error:  # as may a foreign class
        raise ConfigError(
            f"{setting} cannot be made for a pool of one slot ({error!r}): it must take the number "
            "of slots as its only argument"
        ) from error
    if not isinstance(policy, Policy):
        missing = ", ".join(m for m in METHODS if not hasattr(policy, m))
        raise ConfigError(
            f"{setting} is no eviction policy: it lacks {missing}; "
            "see kvtier.core.pool.Policy for what each has to do"
        )
    return found
