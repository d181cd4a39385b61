"""Very many clients: a round costs its cohort, rows may be on disk, and neither changes a
result."""

from pflcore import cli


def test_a_dry_run_says_where_the_rows_are(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        cli.main(
            [
                "run",
                "ditto",
                "--data",
                "synthetic_linear",
                "--rounds",
                "3",
                "--dry-run",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "of the clients' own" in said and "in memory; peak memory" in said and not out.exists()
