"""Finds the pods in a Kubernetes object of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def apart(tree: Any) -> Any:
    """A copy in which no two places share an object, as places with the same YAML anchor do. A change of one pod then
    changes no other pod."""
    if isinstance(tree, dict):
        return {key: apart(child) for key, child in tree.items()}
    return [apart(child) for child in tree] if isinstance(tree, list) else tree


def pods_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields every pod and every template of pods."""
    if _is_pod(tree):
        yield tree
        return
    for child in _children(tree):
        yield from pods_in(child)


def _is_pod(tree: Any) -> bool:
    spec = tree.get("spec") if isinstance(tree, dict) else None
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return isinstance(containers, list) and bool(containers) and all(isinstance(each, dict) for each in containers)


def _children(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


def with_policy(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields every mapping with a restartPolicy beside a template of pods, as a PyTorchJob has. Kubeflow's operator
    writes it over the policy in the template."""
    if isinstance(tree, dict) and "restartPolicy" in tree and _is_pod(tree.get("template")):
        yield tree
    for child in () if _is_pod(tree) else _children(tree):
        yield from with_policy(child)
