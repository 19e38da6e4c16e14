import platform

from proxy.malloc import keep_heap


def test_it_takes_effect_where_glibc_is() -> None:
    assert keep_heap() is (platform.libc_ver()[0] == "glibc")
