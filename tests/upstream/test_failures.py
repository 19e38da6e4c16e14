import errno
import socket
import ssl

import pytest

from proxy.upstream.failures import words


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (None, "connection closed"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 8000)"), "connection refused"),
        (ConnectionResetError(), "connection reset"),
        (BrokenPipeError(), "connection reset"),
        (socket.gaierror(socket.EAI_NONAME, "host-7.internal: Name or service not known"), "name not resolved"),
        (ssl.SSLCertVerificationError("certificate is not valid for 'host-7.internal'"), "certificate not trusted"),
        (ssl.SSLError(1, "WRONG_VERSION_NUMBER"), "TLS failed"),
        (TimeoutError(), "no connection in time"),
        (OSError(errno.EHOSTUNREACH, "No route to host 10.0.0.1"), "no route to host"),
        (OSError("Multiple exceptions: 10.0.0.1, 10.0.0.2"), "cannot connect"),
        (OSError(99_999, "10.0.0.1"), "cannot connect"),
        (ValueError("10.0.0.1"), "not an HTTP response"),
    ],
)
def test_words(exc: BaseException | None, said: str) -> None:
    assert words(exc) == said
