"""Paging on the host: which page belongs to whom. NumPy and stdlib only; never imports JAX."""

from pagedjax.paging.allocator import NULL_PAGE, PageAllocator
from pagedjax.paging.page_table import PageTable, resolve_copies
from pagedjax.paging.prefix_cache import PrefixCache, PrefixCacheStats, PrefixChain

__all__ = [
    "NULL_PAGE",
    "PageAllocator",
    "PageTable",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixChain",
    "resolve_copies",
]
