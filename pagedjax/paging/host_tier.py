"""The host tier: which page of the host pool holds the content of which full page.

Owns the link between a prefix node and its host page, both ways. The pages themselves are those
of an allocator of their own, ids 1 to `num_host_pages`, in the same four states as device pages:
*held* by swapped sequences, *evictable* (a node names it, nobody holds it: kept for a later hit,
least recently used given up first) or *free*. Knows nothing of transfers, tokens or sequences.

A full page has one home here, its node's, so what sequences share is moved and kept once. A
partial page, or one that the prefix cache does not know, is private: held, and no node names it.
"""

from pagedjax.errors import IntegrityError
from pagedjax.paging.allocator import PageAllocator
from pagedjax.paging.prefix_cache import PrefixNode


class HostTier:
    """Host pages by content. Without any (`usable` 0) it holds nothing and finds nothing.

    Attributes:
      allocator: of host pages; its cached pages are those that a node names.
    """

    def __init__(self, allocator: PageAllocator):
        """Takes the allocator's `on_evict`."""
        if allocator.on_evict is not None:
            raise IntegrityError("`allocator` must not serve another tier already.")
        self.allocator = allocator
        self._node_of: list[PrefixNode | None] = [None] * allocator.num_pages
        allocator.on_evict = self._forget

    def page_of(self, node: PrefixNode) -> int | None:
        """The host page with a node's content. Right inside a transaction of the allocator too,
        where nodes hear of evictions only at the end."""
        page = node.host_page
        return page if page is not None and self.allocator.is_cached(page) else None

    def attach(self, node: PrefixNode, host_page: int) -> None:
        """A held host page is to get a node's content; the node must have none."""
        if node.host_page is not None:
            raise IntegrityError(
                f"`node` must have no host page yet. Got one with page {node.host_page}."
            )
        self.allocator.mark_cached(host_page)
        self._node_of[host_page] = node
        node.host_page = host_page

    def lose(self, host_page: int) -> None:
        """The content of a host page is gone: no node names it any more. Its holders are told by
        the caller."""
        if self._node_of[host_page] is not None:
            self.allocator.unmark(host_page)

    def reset(self) -> None:
        """Forgets the content of the pages that nobody holds. O(host pages)."""
        for page, node in enumerate(self._node_of):
            if node is not None and not self.allocator.references(page):
                self.allocator.unmark(page)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless nodes, pages and the allocator's flags agree."""
        for page in range(1, self.allocator.num_pages):
            node, cached = self._node_of[page], self.allocator.is_cached(page)
            if cached != (node is not None):
                raise IntegrityError(
                    f"host page {page} must be cached and attached or neither. "
                    f"Got cached: {cached}."
                )
            if node is not None and node.host_page != page:
                raise IntegrityError(
                    f"the node of host page {page} must name it. Got {node.host_page}."
                )

    def _forget(self, page: int) -> None:
        node = self._node_of[page]
        if node is None:
            raise IntegrityError(f"`page` must be attached. Got host page {page}, which is not.")
        node.host_page = self._node_of[page] = None
