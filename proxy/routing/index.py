"""Which replica holds which block, as far as can be known from outside.

One tree of runs for each seed (model, salt, kind): a node is a run of blocks without a branch, and its hashes are
packed in an array, so that a block costs some ten bytes and a walk compares one number a run (hashes are chained: if
the last of a run is equal, all are). Each replica that holds a run is a bit in the node's mask.

Each replica has an LRU of the runs it is thought to hold, bounded by its own KV capacity in tokens and cut from the
end of the least recently used run, as the engine evicts. A walk from a prompt's end to its root touches the root last,
so the order of an LRU never puts a run before the runs that continue it, and whoever holds a run holds its ancestors.
"""

from array import array
from typing import Final

from proxy.routing.runs import Held, Node, Path, bits

UNBOUNDED: Final = float("inf")
_NODE_BYTES: Final = 320
_USE_BYTES: Final = 240


class Index:
    """Replicas are small ints (slots); a slot that is dropped may be used again."""

    def __init__(self) -> None:
        self._roots: dict[int, Node] = {}
        self._seeds: dict[str, set[int]] = {}
        self._names: dict[Node, tuple[str, int]] = {}
        self._held: dict[int, Held] = {}
        self._nodes = 0
        self._hashes = 0
        self.blocks = 0
        """Blocks tracked, each counted once for each replica that holds it."""

    def size(self) -> int:
        """Bytes of memory, estimated."""
        return self._nodes * _NODE_BYTES + self._hashes * 8 + sum(len(h.lru) for h in self._held.values()) * _USE_BYTES

    # Replicas and models.

    def set_capacity(self, slot: int, tokens: int | None) -> None:
        """Add a replica, or change how many tokens it can hold (None: not known, no bound)."""
        capacity = UNBOUNDED if tokens is None else float(tokens)
        held = self._held.get(slot)
        if held is None:
            self._held[slot] = Held(capacity)
        else:
            held.capacity = capacity
            self._shrink(slot, held)

    def forget(self, slot: int) -> None:
        """The replica's cache is empty."""
        held = self._held.get(slot)
        if held is not None:
            self._held[slot] = Held(held.capacity, held.ticks)
            clear = ~(1 << slot)
            for node, (covered, _) in held.lru.items():
                node.mask &= clear
                self.blocks -= covered
            for node in held.lru:
                self._prune(node)

    def forget_older(self, slot: int, tick: int) -> None:
        """The replica evicted what was last used at `tick`, and so all that was used before."""
        held = self._held.get(slot)
        while held is not None and held.lru:
            node, (covered, last) = next(iter(held.lru.items()))
            if last > tick:
                return
            self._release(slot, held, node, covered)

    def drop(self, slot: int) -> None:
        """The replica is gone."""
        self.forget(slot)
        self._held.pop(slot, None)

    def forget_model(self, model: str) -> None:
        """Nothing cached for this model will be used again. On the replicas it is dead weight until it ages out."""
        for seed in self._seeds.pop(model, ()):
            self._names.pop(self._roots.pop(seed), None)

    # Looking up.

    def root(self, seed: int) -> Node | None:
        return self._roots.get(seed)

    def walk(self, seed: int, blocks: list[int]) -> Path:
        """The known runs that the prompt begins with."""
        path: Path = []
        node = self._roots.get(seed)
        at, size = 0, len(blocks)
        while node is not None and node.children is not None and at < size:
            node = node.children.get(blocks[at])
            if node is None:
                break
            run = node.blocks
            length = len(run)
            if at + length <= size and blocks[at + length - 1] == run[-1]:
                path.append((node, length))
                at += length
                continue
            low, high = 1, min(length, size - at)
            while low < high:
                middle = (low + high + 1) // 2
                if run[middle - 1] == blocks[at + middle - 1]:
                    low = middle
                else:
                    high = middle - 1
            path.append((node, low))
            break
        return path

    def depth(self, path: Path, slot: int) -> int:
        """How many blocks of the path the replica holds."""
        return self.holding(path, slot)[0]

    def holding(self, path: Path, slot: int) -> tuple[int, int]:
        """How many blocks of the path the replica holds, and the tick of its last use of them; (0, 0) for none."""
        for node, matched in reversed(path):
            if node.mask >> slot & 1:
                covered, tick = self._held[slot].lru[node]
                return node.start + (covered if covered < matched else matched), tick
        return 0, 0

    def ticks(self, slot: int) -> int:
        """The replica's uses so far."""
        return self._held[slot].ticks

    # Recording.

    def record(self, model: str, seed: int, blocks: list[int], tokens_per_byte: float, slot: int, path: Path) -> Path:
        """The replica has these blocks now (or will have them before it looks at any later request).

        `path` is what `walk` said of the same blocks, with no change of the index since; what it would say now is
        returned.
        """
        held = self._held.get(slot)
        if held is None or not blocks:
            return []
        node, matched = path[-1] if path else (None, 0)
        # A prompt that is known to its last block, as siblings are, changes nothing of the tree.
        if node is None or node.start + matched < len(blocks) or matched < len(node.blocks):
            path = list(path)
            if node is not None and matched < len(node.blocks):
                path[-1] = (self._split(node, matched), matched)
            at = path[-1][0].start + matched if path else 0
            if at < len(blocks):
                path.append((self._add(model, seed, path, blocks[at:], at, tokens_per_byte), len(blocks) - at))
            node = path[-1][0]
        node.asked += 1
        bit = 1 << slot
        tick = held.ticks = held.ticks + 1
        lru = held.lru
        for node, matched in reversed(path):
            if node.mask & bit:
                covered = lru[node][0]
                if covered < matched:
                    held.tokens += node.tokens(matched) - node.tokens(covered)
                    self.blocks += matched - covered
                    covered = matched
                lru.move_to_end(node)
                lru[node] = (covered, tick)
            else:
                node.mask |= bit
                held.tokens += node.tokens(matched)
                self.blocks += matched
                lru[node] = (matched, tick)
        if held.tokens > held.capacity:
            self._shrink(slot, held)
        return path

    def count_prompt(self, seed: int, path: Path) -> None:
        """A new prompt was placed; `path` is its own."""
        root = self._roots.get(seed)
        if root is not None:
            root.prompts += 1
            for node, _ in path:
                node.prompts += 1

    def occupy(self, slot: int, tokens: int) -> None:
        """The replica holds this many tokens more that no prompt can name (an answer whose tokens were not seen)."""
        held = self._held.get(slot)
        if held is None or tokens <= 0:
            return
        node = Node(None, 0, array("Q"), float(tokens))
        held.ticks += 1
        held.lru[node] = (0, held.ticks)
        held.tokens += tokens
        if held.tokens > held.capacity:
            self._shrink(slot, held)

    def remove(self, slot: int, path: Path, keep: int) -> None:
        """The replica does not hold the blocks of the path beyond the first `keep`, nor what continues them."""
        held = self._held.get(slot)
        if held is None:
            return
        for node, _ in path:
            left = keep - node.start
            if left < len(node.blocks):
                self._cut(slot, held, node, max(0, left))
                return

    def tokens(self, slot: int) -> float:
        """Tokens that the replica is thought to hold."""
        held = self._held.get(slot)
        return 0.0 if held is None else held.tokens

    # Inside.

    def _add(self, model: str, seed: int, path: Path, blocks: list[int], at: int, tokens_per_byte: float) -> Node:
        if path:
            parent = path[-1][0]
        else:
            root = self._roots.get(seed)
            if root is None:
                root = self._roots[seed] = Node(None, 0, array("Q"), 0.0)
                self._seeds.setdefault(model, set()).add(seed)
                self._names[root] = (model, seed)
            parent = root
        node = Node(parent, at, array("Q", blocks), tokens_per_byte)
        if parent.children is None:
            parent.children = {}
        parent.children[blocks[0]] = node
        self._nodes += 1
        self._hashes += len(blocks)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two before block `at` of it; the new first half."""
        upper = Node(node.parent, node.start, node.blocks[:at], node.tokens_per_byte)
        self._nodes += 1
        upper.prompts = node.prompts
        upper.mask = node.mask
        parent = node.parent
        assert parent is not None and parent.children is not None
        parent.children[upper.blocks[0]] = upper
        node.parent = upper
        node.start += at
        node.blocks = node.blocks[at:]
        upper.children = {node.blocks[0]: node}
        for slot in bits(upper.mask):
            lru = self._held[slot].lru
            covered, tick = lru[node]
            # An OrderedDict has no insertion in the middle: the upper half and what is before it count as used just
            # now, which keeps runs behind those that continue them.
            lru[upper] = (min(covered, at), tick)
            above = parent
            while above.mask >> slot & 1:
                lru.move_to_end(above)
                if above.parent is None:
                    break
                above = above.parent
            if covered > at:
                lru[node] = (covered - at, tick)
            else:
                del lru[node]
                node.mask &= ~(1 << slot)
        self._prune(node)
        return upper

    def _shrink(self, slot: int, held: Held) -> None:
        """Evict from the least recently used run, its last blocks first, until the rest fits."""
        lru = held.lru
        while held.tokens > held.capacity and lru:
            node, (covered, tick) = next(iter(lru.items()))
            excess = held.tokens - held.capacity
            size = node.tokens(covered)
            keep = 0 if size <= excess else int(covered * (1.0 - excess / size))
            while keep and size - node.tokens(keep) < excess:
                keep -= 1
            if keep:
                lru[node] = (keep, tick)
                held.tokens -= size - node.tokens(keep)
                self.blocks -= covered - keep
            else:
                self._release(slot, held, node, covered)
        if not lru:
            held.tokens = 0.0

    def _cut(self, slot: int, held: Held, node: Node, keep: int) -> None:
        """Leave the replica the first `keep` blocks of this run and nothing of what continues it."""
        todo = list((node.children or {}).values())
        below: list[Node] = []
        while todo:
            child = todo.pop()
            if child.mask >> slot & 1:
                below.append(child)
                todo.extend((child.children or {}).values())
        for child in reversed(below):
            self._release(slot, held, child, held.lru[child][0])
        if node.mask >> slot & 1:
            covered, tick = held.lru[node]
            if keep == 0:
                self._release(slot, held, node, covered)
            elif covered > keep:
                held.lru[node] = (keep, tick)
                held.tokens -= node.tokens(covered) - node.tokens(keep)
                self.blocks -= covered - keep

    def _drop_root(self, node: Node) -> None:
        name = self._names.pop(node, None)
        if name is not None:
            model, seed = name
            del self._roots[seed]
            seeds = self._seeds[model]
            seeds.discard(seed)
            if not seeds:
                del self._seeds[model]

    def _release(self, slot: int, held: Held, node: Node, covered: int) -> None:
        del held.lru[node]
        held.tokens -= node.tokens(covered)
        self.blocks -= covered
        node.mask &= ~(1 << slot)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take runs that nobody holds out of the tree."""
        while node.mask == 0 and not node.children:
            parent = node.parent
            if parent is None or parent.children is None:
                self._drop_root(node)
                return
            del parent.children[node.blocks[0]]
            node.parent = None
            self._nodes -= 1
            self._hashes -= len(node.blocks)
            if not parent.children:
                parent.children = None
            node = parent
