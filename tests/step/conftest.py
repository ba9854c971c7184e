"""The device paths that tests of the step run on."""

from control.conftest import device as device
