"""Write the part of the page that tells the story: the verdict in a sentence, the incidents, what they came from."""

from collections.abc import Mapping, Sequence
from typing import Any

from sentinel.postmortem.diagnosis import Diagnosis, Verdict
from sentinel.postmortem.html_markup import Html, element, joined, table
from sentinel.postmortem.series import Series
from sentinel.postmortem.wording import action_line, counted, duration, grouped_actions, kind_words, sentences
from sentinel.vocabulary import Action, Outcome

MOST_CARDS = 60  # incidents told one by one; the rest is in --json
_MOST_ACTIONS = 25  # rows of one card
_VERDICT_MARKS = {Verdict.POINTS: "●", Verdict.SHOWS: "◐", Verdict.CLEARS: "○", Verdict.UNKNOWN: "?"}
_STATUS_WORDS = {
    "completed": "The run completed",
    "running": "The run is going; so far it took",
    "failed": "The run failed after",
    "lost": "The process vanished after",
}


def verdict(report: Mapping[str, Any], series: Series) -> str:
    """The whole run in a few sentences."""
    run, incidents, ratio = report["run"], report["incidents"], report["goodput"]["ratio"]
    text = f"{_STATUS_WORDS.get(run['status'], 'The run took')} {counted(run['steps'], 'step', 'steps')}. "
    text += "Its last loss is not finite. " if ends_nonfinite(series) else ""
    if not incidents:
        return text + "Nothing wrong was found."
    acted = [row for row in incidents if any(act["outcome"] == Outcome.APPLIED for act in row["actions"])]
    still_open = sum(row["status"] == "open" for row in incidents)
    lost = sum(row["status"] == "gave_up" for row in incidents)
    found = counted(len(incidents), "incident", "incidents")
    how_many = "each" if len(acted) == len(incidents) > 1 else "it" if acted and len(incidents) == 1 else len(acted)
    text += f"Sentinel found {found} and {f'acted on {how_many}' if acted else 'took no action'}"
    text += f"; {_are(still_open)} still open" if still_open else ""
    text += f"; {_are(lost)} not resolved" if lost else ""
    text += "; all ended well" if acted and not (still_open or lost) else ""
    return f"{text}." + (f" {ratio:.0%} of the time went into steps that count." if ratio is not None else "")


def story(report: Mapping[str, Any], diagnoses: Sequence[Diagnosis], series: Series) -> Html:
    """All incidents, each with its card; then what a person asked for."""
    incidents = report["incidents"]
    told = list(zip(incidents, diagnoses, strict=True))[:MOST_CARDS]
    cards = [_card(incident, diagnosis, series) for incident, diagnosis in told]
    if not cards:
        cards = [element("p", f"Nothing wrong was found in {report['run']['steps']} steps.", class_="calm")]
    left_out = len(incidents) - len(told)
    more = element("p", f"{left_out} more are in sentinel postmortem --json.", class_="quiet") if left_out else None
    asked = report["requests"]
    requests = (
        joined(
            element("h2", "Asked for by a person"),
            element("ul", [element("li", line) for line in grouped_actions(asked)]),
        )
        if asked
        else None
    )
    return joined(element("h2", "Incidents"), *cards, more, requests)


def _card(incident: Mapping[str, Any], diagnosis: Diagnosis, series: Series) -> Html:
    kind = kind_words(incident["kind"])
    badges = [
        element("span", f"{incident['severity']} {incident['tier']}", class_=f"badge {incident['severity']}"),
        element("span", kind_words(incident["status"]), class_=f"badge {incident['status']}"),
    ]
    return element(
        "article",
        element("header", element("h3", kind[0].upper() + kind[1:]), badges),
        element("p", sentences(incident), class_="lead"),
        element("p", incident["summary"], class_="quiet"),
        _facts(incident, series),
        _diagnosis(diagnosis),
        _actions(incident["actions"]),
        _evidence(incident["evidence"]),
        class_=f"card {incident['severity']}",
        id=f"incident-{incident['id']}",
    )


def _facts(incident: Mapping[str, Any], series: Series) -> Html:
    facts = [
        ("onset", f"step {incident['onset_step']}"),
        ("seen first", f"step {incident['first_step']}"),
        ("last", f"step {incident['last_step']}"),
        ("ranks", ", ".join(map(str, incident["ranks"])) or "all"),
        ("opened", moment(incident["opened_at"])),
        ("resolved", moment(incident["resolved_at"])),
        ("cost", cost(incident, series)),
        ("how it ended", incident["cause"] or "not known yet"),
    ]
    return pairs(facts)


def cost(incident: Mapping[str, Any], series: Series) -> str:
    """The actions' own seconds, and the steps that they took back with the seconds those had taken."""
    applied = [act for act in incident["actions"] if act["outcome"] == Outcome.APPLIED]
    acting = sum(act["seconds"] or 0.0 for act in applied)
    rollbacks = [act for act in applied if act["action"] == Action.ROLLBACK and act["target_step"] is not None]
    skipped = sum(act["action"] == Action.SKIP_UPDATE for act in applied)
    span = series.span(incident["attempt"], incident["generation"])
    parts = [counted(skipped, "update", "updates") + " not applied"] if skipped else []
    if rollbacks and span is not None:
        first = series.spans.index(span)
        gone = series.spans[first : first + len(rollbacks)]
        steps = sum(one.end - one.live_end for one in gone)
        seconds = sum(sum(series.columns["step_seconds"].finite(one.live_end, one.end)) for one in gone)
        parts.append(f"{counted(steps, 'step', 'steps')} taken back ({duration(seconds)})")
    parts += [f"{duration(acting)} of turns"] if acting else []
    return ", ".join(parts) or "nothing"


def _diagnosis(diagnosis: Diagnosis) -> Html | None:
    if not diagnosis.clues:
        return None
    clues = [
        element(
            "li",
            element("span", _VERDICT_MARKS[clue.verdict], class_="mark", aria_hidden="true"),
            element("strong", str(clue.link)),
            element("span", clue.verdict, class_="word"),
            element("p", clue.text),
            class_=clue.verdict.name.lower(),
        )
        for clue in diagnosis.clues
    ]
    return element(
        "section",
        element("h4", "Where it came from"),
        element("p", diagnosis.conclusion, class_="conclusion"),
        element("ol", clues, class_="chain"),
    )


def _actions(actions: Sequence[Mapping[str, Any]]) -> Html:
    if not actions:
        return element("p", "No action was decided.", class_="quiet")
    rows: list[list[object]] = [
        [
            kind_words(act["action"]),
            kind_words(act["reason"]),
            act["requested_step"] if act["applied_step"] is None else act["applied_step"],
            "–" if act["target_step"] is None else act["target_step"],
            act["skipped_batches"] or "–",
            act["outcome"] or "–",
            "–" if act["seconds"] is None else duration(act["seconds"]),
            act["text"],
        ]
        for act in actions[:_MOST_ACTIONS]
    ]
    headings = ["action", "why", "at step", "back to", "batches skipped", "outcome", "took", "in words"]
    found = table(headings, rows, numbers=frozenset({"at step", "back to", "batches skipped", "took"}))
    left_out = actions[_MOST_ACTIONS:]
    more = element("p", f"and {len(left_out)} more, the last: {action_line(left_out[-1])}") if left_out else None
    return joined(element("h4", "Actions"), found, more)


def _evidence(evidence: Mapping[str, Any]) -> Html | None:
    if not evidence:
        return None
    facts = [(kind_words(name), shown(value)) for name, value in evidence.items()]
    return element("details", element("summary", "Evidence"), pairs(facts))


def pairs(facts: Sequence[tuple[str, object]]) -> Html:
    """A list of names and values."""
    return element(
        "dl", [element("div", element("dt", name), element("dd", value)) for name, value in facts], class_="facts"
    )


def shown(value: object) -> str:
    """A value of evidence or configuration, short enough to read."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def moment(time: str | None) -> str:
    """A time of the report for a person."""
    return "not yet" if time is None else f"{time[:10]} {time[11:19]} UTC"


def ends_nonfinite(series: Series) -> bool:
    """Whether the last loss is NaN or infinite."""
    return len(series) - 1 in series.columns["loss"].nonfinite


def _are(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"
