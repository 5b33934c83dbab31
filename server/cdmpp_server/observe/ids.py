"""``prediction_id``: an answer in a token, so that a measurement needs nothing but it and a latency.

The token holds the whole query (by hashes) and the answer. The service keeps no list of what it
answered: any worker, also one started later, reads any token. It is no secret and no signature: whoever
may observe may also send program, device and latency without one. The checksum finds tokens that were
cut or mistyped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from dataclasses import dataclass
from functools import lru_cache

from cdmpp.prediction import Prediction
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

#: No token is longer (characters).
MAX_ID = 400

_VERSION = 1
# Version; backend, protocol, framework (0: none); lengths of the two names; program hash; device digest;
# latency, lower, upper.
_HEAD = struct.Struct(">B3B2B16s8s3d")
_CHECK_BYTES = 6
# What MAX_ID leaves for the names, shared between them (bytes of UTF-8).
_MAX_DEVICE, _MAX_MODEL = 120, 110
# Far outside of what is predicted, and still fit for sums of ratios.
_SECONDS = (1e-18, 1e18)
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_CODE_OF_BACKEND = {name: code for code, name in enumerate(BACKENDS)}
_CODE_OF_PROTOCOL = {name: code for code, name in enumerate(PROTOCOLS)}
_FRAMEWORKS: tuple[str | None, ...] = (None, *FRAMEWORKS)
_CODE_OF_FRAMEWORK = {name: code for code, name in enumerate(_FRAMEWORKS)}


@dataclass(frozen=True)
class PredictedBefore:
    """What a ``prediction_id`` says.

    Attributes
    ----------
    program_hash : str
        32 hexadecimal digits.
    device, device_digest : str
        Name, and hash of the figures (16 hexadecimal digits): two devices of one name differ here.
    backend, protocol, framework
        As asked.
    model_id : str
        Who answered. A name longer than a token holds is cut and ends with a hash of the whole.
    latency_s, lower_s, upper_s : float
        The answer, in seconds.
    """

    program_hash: str
    device: str
    device_digest: str
    backend: str
    protocol: str
    framework: str | None
    model_id: str
    latency_s: float
    lower_s: float
    upper_s: float


def make_id(prediction: Prediction, device_digest: str) -> str:
    """The token of an answer: the same for the same answer of the same model.

    Parameters
    ----------
    prediction : Prediction
        One with figures.
    device_digest : str
        ``DeviceSpec.digest()`` of its device.

    Returns
    -------
    str
        At most :data:`MAX_ID` characters of ``A-Z a-z 0-9 _ -``.

    Raises
    ------
    ValueError
        The prediction is an error.
    """
    if prediction.program_hash is None or prediction.latency_s is None:
        raise ValueError("a prediction without figures has no id")
    device = _fitting(prediction.device, _MAX_DEVICE)
    model = _fitting(prediction.model_id, _MAX_MODEL)
    content = (
        _HEAD.pack(
            _VERSION,
            _CODE_OF_BACKEND[prediction.backend],
            _CODE_OF_PROTOCOL[prediction.protocol],
            _CODE_OF_FRAMEWORK[prediction.framework],
            len(device),
            len(model),
            bytes.fromhex(prediction.program_hash),
            bytes.fromhex(device_digest),
            prediction.latency_s,
            prediction.lower_s,
            prediction.upper_s,
        )
        + device
        + model
    )
    return base64.urlsafe_b64encode(content + _checksum(content)).rstrip(b"=").decode("ascii")


def read_id(text: str) -> PredictedBefore:
    """What the token says.

    Raises
    ------
    ValueError
        It is none of :func:`make_id`'s, or no longer whole; the message says what is wrong with it.
    """
    if len(text) > MAX_ID:
        raise ValueError(f"a prediction_id has at most {MAX_ID} characters")
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("this is not a prediction_id") from None
    # Python also reads the other alphabet, and bits that stand for nothing.
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != text:
        raise ValueError("this is not a prediction_id, or not all of it")
    content, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(content) < _HEAD.size or _checksum(content) != check:
        raise ValueError("this is not a prediction_id, or not all of it")
    version, backend, protocol, framework, device_bytes, model_bytes, program, digest, *figures = _HEAD.unpack_from(
        content
    )
    names = content[_HEAD.size :]
    # The checksum is no secret: what follows can be anything.
    if (
        version != _VERSION
        or backend >= len(BACKENDS)
        or protocol >= len(PROTOCOLS)
        or framework >= len(_FRAMEWORKS)
        or len(names) != device_bytes + model_bytes
        or not all(_SECONDS[0] <= figure <= _SECONDS[1] for figure in figures)
        or not figures[1] <= figures[0] <= figures[2]
    ):
        raise ValueError("this prediction_id is of another version of the service")
    try:
        device, model = names[:device_bytes].decode(), names[device_bytes:].decode()
    except UnicodeDecodeError:
        raise ValueError("this is not a prediction_id") from None
    # Other text than names have could not be kept in every database.
    if not device or not model or _CONTROL.search(device + model):
        raise ValueError("this is not a prediction_id")
    return PredictedBefore(
        program.hex(),
        device,
        digest.hex(),
        BACKENDS[backend],
        PROTOCOLS[protocol],
        _FRAMEWORKS[framework],
        model,
        *figures,
    )


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()


@lru_cache(maxsize=1024)
def _fitting(name: str, limit: int) -> bytes:
    """The name in UTF-8; a longer one cut between characters, with a hash that keeps it apart."""
    # A lone surrogate can come in by JSON; it cannot go out as UTF-8.
    whole = name.encode("utf-8", "replace")
    if len(whole) <= limit:
        return whole
    ending = "~" + hashlib.sha256(whole).hexdigest()[:8]
    return whole[: limit - len(ending)].decode("utf-8", "ignore").encode() + ending.encode()
