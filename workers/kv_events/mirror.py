"""The published blocks of one rank, as the bytes of their events.

A block is published while it and all its ancestors are cached. Every subscriber has the same blocks,
whether it has followed from the beginning or began with a snapshot.

                    parent unknown ─▶ ignored
    stored ─┬─▶ visible   it and all ancestors are cached             published
            └─▶ hidden    cached, an ancestor is gone                 not published until it is back
    removed ──▶ gone      remembered while a block below is hidden, so that it can come back

Engines evict leaves first, so hidden and gone blocks are rare. An engine that does not must not leave
subscribers with children whose parent they do not have.
"""

from slagate.workers.kv_events.wire import CLEARED_EVENT, EventWriter, WireBlock, level_of, on_level


class Mirror:
    """The blocks of one rank. Its methods write the events for subscribers to an `EventWriter`."""

    def __init__(self) -> None:
        self.visible: dict[int, bytes] = {}  # hash -> event; parents before children
        self._hidden: dict[int, bytes] = {}
        self._gone: dict[int, bytes] = {}
        self._parents: dict[int, int | None] = {}  # of the blocks in all three
        self._children: dict[int, int | set[int]] = {}  # most blocks have at most one
        self.n_orphans = 0
        self.n_unknown_removed = 0

    @property
    def n_hidden(self) -> int:
        """Cached blocks that are not published, as an ancestor is gone."""
        return len(self._hidden)

    def store(self, block: WireBlock, writer: EventWriter) -> None:
        """Add a cached block or renew a known one; an orphan (parent unknown) is only counted."""
        event = block.event()
        known = self._known(block.hash) if block.hash in self._parents else None
        if known is not None and known[:-1] == event[:-1]:
            self._restore(block.hash, event, writer)
            return
        if known is not None:
            self._forget(block.hash, writer)
        if block.parent is None or block.parent in self.visible:
            self.visible[block.hash] = event
            writer.stored(block)
        elif block.parent in self._parents:
            self._hidden[block.hash] = event
        else:
            self.n_orphans += 1
            return
        self._link(block.hash, block.parent)

    def remove(self, hash_: int, writer: EventWriter) -> None:
        """Remove a block and hide those below it. An unknown one is only counted."""
        event = self.visible.pop(hash_, None)
        if event is not None:
            if hash_ in self._children:
                self._hide_below(hash_, writer)
            writer.removed(hash_, level_of(event))
        else:
            event = self._hidden.pop(hash_, None)
        if event is None:
            self.n_unknown_removed += 1
        elif hash_ in self._children:
            self._gone[hash_] = event
        else:
            self._unlink(hash_)

    def move(self, hash_: int, level: int, writer: EventWriter) -> None:
        """Move a block to another level, without a moment on none. No-op for an unknown one."""
        if hash_ in self.visible:
            event = self.visible[hash_]
            if level_of(event) != level:
                self.visible[hash_] = moved = on_level(event, level)
                writer.event(moved)
                writer.removed(hash_, level_of(event))
        elif hash_ in self._hidden:
            self._hidden[hash_] = on_level(self._hidden[hash_], level)

    def clear(self, writer: EventWriter) -> None:
        """Forget all blocks."""
        for blocks in (self.visible, self._hidden, self._gone, self._parents, self._children):
            blocks.clear()
        writer.event(CLEARED_EVENT)

    def _known(self, hash_: int) -> bytes | None:
        return self.visible.get(hash_) or self._hidden.get(hash_) or self._gone.get(hash_)

    def _restore(self, hash_: int, event: bytes, writer: EventWriter) -> None:
        """A known block was stored again: it has moved, or it is back, with the hidden ones below it."""
        if hash_ in self.visible:
            self.move(hash_, level_of(event), writer)
            return
        self._gone.pop(hash_, None)
        self._hidden[hash_] = event
        parent = self._parents[hash_]
        if parent is None or parent in self.visible:
            below = [hash_]
            while below:
                hash_ = below.pop()
                if hash_ in self._hidden:
                    self.visible[hash_] = self._hidden.pop(hash_)
                    writer.event(self.visible[hash_])
                    below += self._children_of(hash_)

    def _hide_below(self, hash_: int, writer: EventWriter) -> None:
        """Hide all descendants, the lowest first. No visible block is below one that is not."""
        found = [child for child in self._children_of(hash_) if child in self.visible]
        for known in found:
            found += [child for child in self._children_of(known) if child in self.visible]
        for known in reversed(found):
            event = self._hidden[known] = self.visible.pop(known)
            writer.removed(known, level_of(event))

    def _forget(self, hash_: int, writer: EventWriter) -> None:
        """Drop a block, whose content has changed, and all below it."""
        found = [hash_]
        for known in found:
            found += self._children_of(known)
        for known in reversed(found):
            event = self.visible.pop(known, None)
            if event is not None:
                writer.removed(known, level_of(event))
            self._hidden.pop(known, None)
            self._gone.pop(known, None)
            if known in self._parents:  # a gone parent goes with its last child
                self._unlink(known)

    def _children_of(self, hash_: int) -> list[int]:
        children = self._children.get(hash_, ())
        return [children] if isinstance(children, int) else list(children)

    def _link(self, hash_: int, parent: int | None) -> None:
        self._parents[hash_] = parent
        if parent is None:
            return
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = hash_
        elif isinstance(siblings, int):
            self._children[parent] = {siblings, hash_}
        else:
            siblings.add(hash_)

    def _unlink(self, hash_: int) -> None:
        """Take a block without children out of the tree, and gone ancestors that have none then."""
        while True:
            parent = self._parents.pop(hash_)
            if parent is None:
                return
            siblings = self._children[parent]
            if isinstance(siblings, set):
                siblings.discard(hash_)
                if siblings:
                    return
            del self._children[parent]
            if self._gone.pop(parent, None) is None:
                return
            hash_ = parent
