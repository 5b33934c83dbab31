from cdmpp.predict.requests.budget import Progress, SearchControl


def test_a_watch_without_budget_does_not_expire_and_stops_when_asked() -> None:
    watch = SearchControl()
    assert watch.left_s == float("inf")
    assert not watch.expired
    watch.stop()
    assert watch.expired
    assert watch.left_s == 0


def test_the_listener_hears_of_the_best_so_far() -> None:
    heard: list[Progress] = []
    watch = SearchControl(1000, heard.append, every_s=0)
    watch.report(best=3.0, bound=2.0, answer=lambda: {"x": 1})
    watch.report(done=5.0)
    assert [each.best for each in heard] == [3.0, None]
    assert heard[0].answer is not None
    assert heard[0].answer() == {"x": 1}
    assert 0 <= heard[0].done < 0.1
    assert heard[1].done == 1


def test_the_listener_is_not_told_too_often() -> None:
    heard: list[Progress] = []
    watch = SearchControl(1000, heard.append, every_s=1000)
    for _ in range(10):
        watch.report(best=1.0)
    assert heard == []
