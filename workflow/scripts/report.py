"""Make the report of all runs as a page, Markdown, CSV and JSON, and print the table."""

import shutil
import sys

from lockstep import cli, paths
from lockstep.errors import printable, tell
from lockstep.report import headline, page, studies
from lockstep.report.gallery import galleries
from lockstep.report.summary import gather
from lockstep.run import journal
from lockstep.terminal import print_table


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--first", action="store_true", help="for the first block: print one line instead of the table")
    arguments = parser.parse_args()
    config, folder = cli.configuration(arguments, finished=True), paths.report_folder(arguments.results)
    summary = gather(config, arguments.results)
    page.write(summary, folder, paths.predictions_file(arguments.results), galleries(summary, arguments.results))
    journal.note(arguments.results, "report", folder, (paths.SUMMARY, paths.TABLE))
    if arguments.first:
        first_sentence = headline.lines(summary.compared)[0].en
        print(f"after the first block: {first_sentence} The table so far: {folder / paths.PAGE}")
        return
    compared, answer = summary.compared, headline.box(summary.compared)
    for line in [*headline.lines(compared), *(line for section in studies.sections(summary) for line in section.lines)]:
        if line not in answer:
            tell(line.en)
    for row in summary.rows:
        if row["status"] != "ok":
            tell(f"{row['row']} {row['status']}: {printable(row['reason'])}", bad=row["status"] == "failed")
    # What answers the question stands last, where a terminal has its prompt.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_table(*page.plain(page.by_time(compared.rows), width))
    for line in answer:
        tell(line.en)
    print(f"report: {folder / paths.PAGE}")


if __name__ == "__main__":
    cli.run(main)
