"""Prediction of curves with any predictor."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.predict.curves.plan import CurvePlan, Programs
from cdmpp.predict.curves.points import Curve
from cdmpp.predict.curves.template import Axes
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol


def predict_curve(
    predictor: Predictor,
    programs: Programs,
    axes: Axes,
    devices: Sequence[Device],
    *,
    backend: Backend | None = None,
    protocol: Protocol = DEFAULT_PROTOCOL,
    framework: str | None = None,
    quantiles: Sequence[float] = DEFAULT_QUANTILES,
    monotone: Sequence[str] | None = None,
) -> Curve:
    """Predict a template over axes on devices.

    Parameters
    ----------
    predictor : Predictor
    programs : Template, operator text, operator object, or sequence of Template
        Programs of each point; several are summed, each times its count.
    axes : mapping of name to values
        An axis replaces the field of its name, or occurs in expressions. Values are numbers, texts ("float16") or
        booleans; every axis must be used.
    devices : sequence of DeviceSpec, mapping of its fields, or name
    backend, protocol, framework, quantiles
        See :meth:`cdmpp.predict.predictor.LatencyPredictor.predict`.
    monotone : sequence of str, optional
        Numeric axes along which the fit does not decrease; default: all but ``tp``, ``ep`` and ``ranks_per_node``.

    Returns
    -------
    Curve
        An unknown device, or sizes that are not valid for the operator, are errors of their points.

    Raises
    ------
    DataError
        An axis is unused or invalid, ``monotone`` names something else, there are more than
        :data:`MAX_POINTS` programs to predict, or the options are not known.
    InvalidProgramError, UnsupportedOperatorError
        A template is invalid.

    Examples
    --------
    >>> predict_curve(predictor, "linear:n=4096,k=1024", {"m": [1, 2, 4, 8]}, ["t4"])      # doctest: +SKIP
    """
    plan = CurvePlan(
        programs,
        axes,
        devices,
        backend=backend,
        protocol=protocol,
        framework=framework,
        quantiles=quantiles,
        monotone=monotone,
    )
    return plan.curve(predictor.model_id, predictor.predict_queries(plan.queries, plan.levels))
