import types

import pytest
from pt214.patching import PatchSet


class Owner:
    """Something with an attribute of its own and an inherited one."""

    present = 1

    def __eq__(self, other: object) -> bool:
        return True


def test_undo_restores_what_was_there_and_removes_what_was_not() -> None:
    patches = PatchSet()
    patches.set(Owner, "present", 2)
    patches.set(Owner, "present", 3)
    patches.set(Owner, "absent", 4)
    assert (Owner.present, Owner.absent) == (3, 4)  # type: ignore[attr-defined]
    patches.undo()
    assert Owner.present == 1
    assert not hasattr(Owner, "absent")


def test_an_inherited_attribute_is_uncovered_again_not_copied() -> None:
    class Child(Owner):
        pass

    patches = PatchSet()
    patches.set(Child, "present", 2)
    patches.undo()
    assert "present" not in vars(Child)
    assert Child.present == 1


def test_what_somebody_else_replaced_since_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType("module")
    patches = PatchSet()
    patches.set(module, "name", "ours")
    vars(module)["name"] = "theirs"
    patches.undo()
    assert vars(module)["name"] == "theirs"
    assert "replaced by someone else" in caplog.text
