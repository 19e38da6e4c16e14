from benchmarks.machine import all_cpu_secs, cpu_secs, facts, line


def test_facts_name_what_was_measured_with() -> None:
    found = facts("lorafleet", "no-such-package")
    assert found["no-such-package"] == "absent" and int(found["cores"]) >= 1
    assert f"python {found['python']}" in line(found)


def test_processor_time_only_grows() -> None:
    own, everything = cpu_secs(), all_cpu_secs()
    assert 0 <= own <= cpu_secs()
    assert own <= everything <= all_cpu_secs()
