"""The bounded cache."""

from concurrent.futures import ThreadPoolExecutor

from cdmpp.utils.lru import Lru


def test_least_recently_used_entries_are_dropped_beyond_the_weight() -> None:
    lru: Lru[str] = Lru(10)
    lru.put("a", "A", 4)
    lru.put("b", "B", 4)
    assert lru.get("a") == "A"
    lru.put("c", "C", 4)
    assert (lru.get("a"), lru.get("b"), lru.get("c")) == ("A", None, "C")
    lru.put("a", "A2", 1)
    lru.put("d", "D", 5)
    assert (lru.get("a"), lru.get("c"), lru.get("d")) == ("A2", "C", "D")
    assert (len(lru), lru.weight, lru.values()) == (3, 10, ["A2", "C", "D"])


def test_value_heavier_than_the_cache_is_not_stored() -> None:
    lru: Lru[str] = Lru(10)
    lru.put("a", "A", 4)
    lru.put("d", "D", 5)
    lru.put("d", "too heavy", 11)
    assert (lru.get("a"), lru.get("d"), lru.weight) == ("A", None, 4)


def test_cache_of_weight_zero_stores_nothing() -> None:
    lru: Lru[str] = Lru(0)
    lru.put("a", "A", 1)
    assert (lru.get("a"), len(lru)) == (None, 0)


def test_threads_keep_the_bound() -> None:
    lru: Lru[int] = Lru(50)

    def work(start: int) -> None:
        for i in range(start, start + 500):
            lru.put(i % 97, i, i % 7 + 1)
            lru.get((i * 31) % 97)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert lru.weight <= 50
    assert len(lru.values()) == len(lru)
