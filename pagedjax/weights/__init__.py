"""Weights from files: `resolve_model` finds them, `load_model` reads them."""

from pagedjax.weights.loader import LoadedModel, load_model
from pagedjax.weights.resolve import resolve_model

__all__ = ["LoadedModel", "load_model", "resolve_model"]
