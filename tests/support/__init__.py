"""What tests share. In each process that uses it torch compiles nothing of bitsandbytes."""

from tests.support.after_import import after_import
from tests.support.eager_bitsandbytes import leave_as_they_are

after_import("torch", leave_as_they_are)
