"""What the load benchmark says of requests that wait is by the scheduler's own pages."""

from types import SimpleNamespace

from benchmarks.serving_load import Queue


class Waiting(list):
    def peek_request(self):
        return self[0]


def engine(waiting, running, free):
    pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: free)
    scheduler = SimpleNamespace(block_size=16, waiting=Waiting(waiting), running=running,
                                kv_cache_manager=SimpleNamespace(block_pool=pool))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(
        engine_core=SimpleNamespace(scheduler=scheduler))))


def request(name="1", tokens=0, taken=0):
    return SimpleNamespace(request_id=name, num_tokens=tokens, num_preemptions=taken)


def test_a_request_waits_for_pages_where_it_has_more_tokens_than_the_free_ones():
    assert Queue(engine([request(tokens=161)], [], 10)).short()
    assert not Queue(engine([request(tokens=160), request(tokens=999)], [], 10)).short()
    assert not Queue(engine([], [], 0)).short()


def test_pages_are_counted_without_nobodys_and_preemptions_once():
    queue = Queue(engine([], [request("1", taken=1), request("2")], 10))
    queue.note()
    queue.note()
    assert (queue.page_tokens, sum(queue.taken_back.values())) == (1600, 1)
