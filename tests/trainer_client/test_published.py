from __future__ import annotations

import json

from trainer_client.published import Published, Timings


def test_to_dict_is_json_with_a_total() -> None:
    done = Published(3, "p-v3", "/r/p-v3", "sha256:x", 4, 100, False, True, Timings(1, 2, 3, 4, 5), ("p-v1",))
    body = json.loads(json.dumps(done.to_dict()))
    assert body["seconds"] == {"prepare": 1, "write": 2, "verify": 3, "load": 4, "retire": 5, "total": 15}
    assert (body["version"], body["unloaded"], body["deleted"]) == (3, ["p-v1"], [])
