"""Where the database lies, and that nobody reads the password of one that lies elsewhere."""

from pathlib import Path

import pytest

from sentinel.config import StoreSettings, build
from sentinel.errors import MisuseError, SettingsError
from sentinel.places import Places
from sentinel.store import engine
from sentinel.store.location import url_of

SECRET = "hunter2"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(home=tmp_path / "home", runtime=tmp_path / "runtime")


def test_by_default_it_is_a_file_in_the_home(places: Places) -> None:
    assert url_of(places) == f"sqlite:///{places.home}/sentinel.db"


def test_a_url_may_stand_in_a_file_of_its_own(places: Places, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(f"postgresql+psycopg://u:{SECRET}@h/d\n")
    assert url_of(places, StoreSettings(url_file=str(file))) == f"postgresql+psycopg://u:{SECRET}@h/d"


@pytest.mark.parametrize(("text", "says"), [("", "one line"), ("a\nb", "one line"), (None, "cannot be read")])
def test_a_file_without_a_url_is_misuse(places: Places, tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "url").write_text(text)
    with pytest.raises(SettingsError, match=rf"store\.url_file .*{says}"):
        url_of(places, StoreSettings(url_file=str(tmp_path / "url")))


def test_url_and_file_together_are_misuse() -> None:
    with pytest.raises(SettingsError, match=r"store\.url and store\.url_file are both set"):
        build({"store": {"url": "sqlite:////x/y.db", "url_file": "/x/url"}})


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://u:{SECRET}@h/d",
        f"postgresql://u@h/d?password={SECRET}&sslmode=require",
        f"postgresql://u@h/d?options=-c%20x={SECRET}",
    ],
)
def test_a_url_is_shown_without_its_password(url: str) -> None:
    assert SECRET not in engine.shown(url)
    assert "@h/d" in engine.shown(url)
    assert SECRET not in repr(StoreSettings(url=url))


@pytest.mark.parametrize("url", [f"postgresql//u:{SECRET}@h/d", f"u:{SECRET}@h/d", f"nosuch://u:{SECRET}@h/d"])
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(MisuseError, match=r"store\.url") as caught:
        engine.writer(url)
    assert SECRET not in str(caught.value)
