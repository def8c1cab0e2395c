# Sourced by what fetches packages of Debian. one_release SUITE KIND DIRECTORY: adds to `options` of apt-get what lets it know that
# release alone. KIND: deb, or deb-src. Its lists are fetched into DIRECTORY, and nothing of the system is changed.
one_release() {
    local site
    site=$(apt-get indextargets --format '$(SITE)|$(ORIGIN)|$(COMPONENT)' 'Created-By: Packages' | awk -F'|' '$2 == "Debian" && $3 == "main" { print $1; exit }')
    [ -n "$site" ] || { echo "apt knows no archive of Debian (apt-get update)" >&2; return 1; }
    mkdir -p "$3"/lists/partial "$3"/cache/archives/partial "$3"/parts "$3"/prefs
    printf 'Types: %s\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' "$2" "$site" "$1" >"$3/parts/b.sources"
    options+=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$3/parts" -o "Dir::State::lists=$3/lists"
        -o "Dir::Cache=$3/cache" -o "Dir::Etc::preferencesparts=$3/prefs")
    apt-get "${options[@]}" update >&2
}
