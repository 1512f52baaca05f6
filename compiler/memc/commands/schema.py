"""`memc schema`: the JSON schema of a spec, for editors."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.option(
    "--modeline", "want", flag_value="modeline", help="Print the comment that points an editor at the schema."
)
@click.option("--schemastore", "want", flag_value="schemastore", help="Print the entry for the catalog of SchemaStore.")
@click.option("--url", help="Where the schema is published, or the path of a copy (default: SchemaStore's address).")
def command(want: str | None, url: str | None) -> None:
    """Print the JSON schema of a spec.

    Editors complete and check a spec with it: save it beside your specs (memc schema > memc.schema.json) and put the
    line that `memc schema --modeline --url memc.schema.json` prints at the top of each. It accepts every valid spec and
    refuses unknown keys and wrong types; what depends on facts or on two fields at once, memc compile says.
    """
    from memc.schema import PUBLISHED_URL, modeline, schema_text, schemastore_entry

    address = url or PUBLISHED_URL
    if want == "modeline":
        click.echo(modeline(address))
    elif want == "schemastore":
        click.echo(json.dumps(schemastore_entry(address), indent=2))
    else:
        click.echo(schema_text(address), nl=False)
