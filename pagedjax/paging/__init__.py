"""Paging on the host: which page belongs to whom. NumPy and stdlib only; never imports JAX."""

from pagedjax.paging.allocator import NULL_PAGE, PageAllocator
from pagedjax.paging.host_tier import HostTier
from pagedjax.paging.page_table import PageTable, resolve_copies
from pagedjax.paging.prefix_cache import (
    PrefixCache,
    PrefixCacheStats,
    PrefixChain,
    PrefixHits,
    PrefixNode,
)

__all__ = [
    "NULL_PAGE",
    "HostTier",
    "PageAllocator",
    "PageTable",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixChain",
    "PrefixHits",
    "PrefixNode",
    "resolve_copies",
]
