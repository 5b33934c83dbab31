"""Several devices in one call of a client."""

import pytest

from cdmpp.client import PredictorClient
from cdmpp.errors import UnknownDeviceError
from cdmpp.predict.predictor import LatencyPredictor

PROGRAMS = ["linear:m=512,n=4096,k=1024,dtype=float16", "linear:m=0,n=1,k=1", "softmax:rows=4096,cols=512"]


@pytest.mark.slow
def test_several_devices_equal_the_predictor_in_this_process(url: str, predictor: LatencyPredictor) -> None:
    devices = ["a100-pcie-40gb", "T4"]
    here = predictor.predict(PROGRAMS, devices, protocol="eager", framework="pytorch")
    with PredictorClient(url) as client:
        served = client.predict(PROGRAMS, devices, protocol="eager", framework="pytorch")
        assert [answer.to_dict() | {"prediction_id": None} for answer in served] == [
            answer.to_dict() | {"prediction_id": None} for answer in here
        ]
        assert served.to_arrow().equals(here.to_arrow())
        with pytest.raises(UnknownDeviceError, match="a101"):
            client.predict(PROGRAMS, ["t4", "a101"])
