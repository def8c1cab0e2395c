# What the scenario scripts share: a pod to drive, counts over all segments, checks, the end. Sourced, not run.
#
# A scenario takes the pod as it is: the one that is up, with that one's settings, or a new one with the settings of
# this shell. It counts what it adds, so it can be run again on a directory that has been used. Nobody else should send
# meanwhile. At the end the pod is as it was: up or down, with its own settings.
#
# The pod is the one of this shell's settings on this machine, or any other, named by two variables:
#     KMQ_POD="kubectl exec -i kmq-0 -c gateway --" KMQ_HOST=10.1.2.3 scripts/scenario-1
# The first runs a command inside it, the second is where it takes messages (KMQ_PORT, KMQ_ACK_PORT and KMQ_HTTP_PORT too, where
# they are not those inside: behind a port-forward). Its kubelet starts again what a scenario kills; settings that a scenario
# needs it must have from the start.

set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C
PATH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd):$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH
command -v kmq >/dev/null || { echo "kmq is not installed; run: make setup" >&2; exit 78; }

read -ra pod <<<"${KMQ_POD-}"  # empty: here
unset KMQ_POD                  # which is no setting of a broker
# A kubelet lets what it has started twice wait: 10 s, 20 s, 40 s. All patience is longer by so much.
patience=$((${#pod[@]} ? 4 : 1))

scenario=${0##*scenario-}
scratch=$(mktemp -d)
: >"$scratch/complaints"
failed=0 checks=0 finished='' before=''  # before: how the pod was, "up" or "down"
declare -A restore=()                    # settings of the pod that was up, to give back to it
trap at_exit EXIT

# --- saying ----------------------------------------------------------------------------------------------------------

say() { echo "scenario=$scenario $*"; }

# check NAME WANT GOT
check() {
    local result=pass
    [[ $2 == "$3" ]] || { result=fail failed=$((failed + 1)); }
    checks=$((checks + 1))
    say "check=$1 want=${2// /_} got=${3// /_} result=$result"
}

finish() {
    finished=yes
    exit $((failed > 0))
}

at_exit() {
    local code=$?
    trap - EXIT
    set +e
    pause_ends
    give_back
    if [[ $finished ]]; then
        say "checks=$checks failed=$failed duration_s=$SECONDS result=$([[ $code == 0 ]] && echo pass || echo fail)"
    else
        tail -n 5 "$scratch/complaints" >&2
        say "result=error reason=\"ended before its last check\" exit_code=$code"
        [[ $code != 0 ]] || code=1
    fi
    rm -rf "$scratch"
    exit "$code"
}

# --- the pod -----------------------------------------------------------------------------------------------------------

inside() { "${pod[@]}" "$@" </dev/null; }

# fetch PATH…: these of its files, as they are now, are in $data; those there are. A broker that is idle still seals segments
# and writes indexes, so a directory may change while tar reads it: exit code 1. What is checked are the records.
fetch() {
    if [[ ${pod[*]} ]]; then
        { inside tar -C "$KMQ_DATA" -cz --exclude '*.idx' --ignore-failed-read --warning no-failed-read \
            --warning no-file-changed "$@" || (($? == 1)); } | tar -C "$data" -xz
    fi
}

# signal NAME PID…: with the kill that a shell has built in, for an image need not have another
signal() { inside sh -c 'kill -"$0" "$@"' "$@"; }

# A look at the pod, kept: each one starts a process. Its exit code is 0 when all stages are ready.
look() { inside kmq status --logfmt >"$scratch/status"; }

# One field of the last look: seen router pid
seen() {
    awk -v line="stage=$1" -v name="$2=" '
        $1 == line { for (i = 2; i <= NF; i++) if (index($i, name) == 1) print substr($i, length(name) + 1) }
    ' "$scratch/status"
}

seq_of() { look || true; seen "$1" seq; }

# wait_for SECONDS COMMAND…: until it succeeds; what never comes ends the scenario. What it says on the way is told only then:
# kubectl complains of every "not yet".
wait_for() {
    local deadline=$((SECONDS + $1 * patience))
    shift
    until "$@" 2>>"$scratch/complaints"; do
        if ((SECONDS > deadline)); then
            say "error=timeout waited_for=\"$*\"" >&2
            exit 1
        fi
        sleep 0.05
    done
}

routed() { (($(seq_of router) >= $1)); }

# Asked on the ack port, as any program can: is this seq on disk?
durable() {
    local answer
    exec {ack}<>"/dev/tcp/$KMQ_HOST/$(port ack "$KMQ_ACK_PORT")" || return
    echo "GET_ACK $1" >&"$ack"
    read -r answer <&"$ack"
    exec {ack}>&-
    [[ $answer == ACK ]]
}

# Nothing on the way: all stages ready, all links empty, all at the same seq.
idle() {
    look && awk '
        /^links=/ { for (i = 2; i <= NF; i++) { split($i, f, "="); waits += f[2] } }
        $1 ~ /=(framer|durability|router)$/ { for (i = 2; i <= NF; i++) if ($i ~ /^seq=/) seqs[$i] = 1 }
        END { for (s in seqs) different++; exit waits > 0 || different != 1 }' "$scratch/status"
}

# Who starts again what is killed: the supervisor; nothing in a pod, whose kubelet nobody can kill from in there.
supervisor_pid() { if [[ ! ${pod[*]} ]]; then sed -n 's/^pid=\([0-9]*\) .*/\1/p' "$pipes/supervisor.owner"; fi; }

# All stages are ready, and none of them is one of these pids any more.
replaced() { look && ! grep -qwE "pid=($(IFS='|' && echo "$*"))" "$scratch/status"; }

# come_back PID…: what was killed is there again
come_back() {
    if [[ ! ${pod[*]} ]]; then kmq up >/dev/null; fi  # the supervisor was killed too; a kubelet never is
    wait_for 60 replaced "$@"
}

# The settings of the pod that is up, NUL-terminated. Here its stages have all of them in their environment; the containers of
# another have only those that somebody has set.
settings() {
    if [[ ${pod[*]} ]]; then
        inside python -c 'from kmq.config.settings import load
for name, value in load().environment().items(): print(name, value, sep="=", end="\0")'
    else
        cat "/proc/$(seen framer pid)/environ"
    fi
}

# Make them those of this shell. Where another pod takes messages is for this shell to say.
adopt() {
    local name
    settings >"$scratch/settings"
    for name in "${!KMQ_@}" "${!RB_@}"; do
        if [[ ! ${pod[*]} || ! $name =~ ^KMQ_(HOST|(ACK_|HTTP_)?PORT)$ ]]; then unset "$name"; fi
    done
    while IFS= read -r -d '' name; do
        case $name in KMQ_* | RB_*) [[ -v ${name%%=*} ]] || export "$name" ;; esac
    done <"$scratch/settings"
}

# port NAME SETTING: of a listener, which may have any free one
port() { if (($2)); then echo "$2"; else cat "$pipes/$1.port"; fi; }

# Value in force of a setting, for the ring policies that follow a general one too.
in_force() {
    case $1 in RB_OVERFLOW_POLICY_*) echo "${!1:-${RB_OVERFLOW_POLICY:-block}}" ;; *) echo "${!1:-}" ;; esac
}

# use_pod [NAME=VALUE…]: a pod that is up, idle and has these settings. Sets data, pipes and s0, the last seq so far.
use_pod() {
    if [[ ${pod[*]} ]]; then that_pod "$@"; else own_pod "$@"; fi
    s0=$(seen durability seq)
    say "event=begin data=$KMQ_DATA last_seq=$s0"
}

# Left stopped by a scenario that was killed?
wake_router() {
    [[ $(seen router state) == silent ]] || return 1
    signal CONT "$(seen router pid)"
    wait_for 10 look
}

that_pod() {
    local want name
    if [[ ! ${KMQ_HOST-} ]]; then
        say "error=no_host reason=\"KMQ_HOST must say where ${pod[*]} takes messages\"" >&2
        exit 78
    fi
    look || [[ -s $scratch/status ]] || exit 75  # what should run it there has said why it cannot
    wake_router || true
    wait_for 60 idle
    adopt
    for want in "$@"; do
        name=${want%%=*}
        [[ $(in_force "$name") == "${want#*=}" ]] && continue
        say "error=settings needs=$want has=$(in_force "$name")" \
            "reason=\"set it in the ConfigMap kmq-settings and start the pod again\"" >&2
        exit 78
    done
    data=$scratch/data pipes=$KMQ_PIPES
    mkdir "$data"
}

own_pod() {
    local want name code=0
    look || code=$?
    ((code <= 1)) || exit "$code"  # a setting is wrong, and kmq has said which
    before=$( ((code)) && echo down || echo up)
    if wake_router; then before=up; fi
    if [[ $before == up ]]; then adopt; fi
    for want in "$@"; do
        name=${want%%=*}
        if [[ $before == up && $(in_force "$name") != "${want#*=}" ]]; then restore[$name]=${!name-unset}; fi
        export "$want"
    done
    if ((${#restore[@]})); then
        say "event=restart reason=\"needs $*\""
        kmq down >/dev/null
    fi
    if [[ $before == down ]] || ((${#restore[@]})); then kmq up >/dev/null; fi
    wait_for 60 idle
    adopt
    data=$KMQ_DATA pipes=$KMQ_PIPES
}

# Leave the pod as use_pod found it.
give_back() {
    local name
    [[ $before ]] || return 0
    if [[ $before == down ]] || ((${#restore[@]})); then kmq down >/dev/null; fi
    if [[ $before == up ]]; then
        for name in "${!restore[@]}"; do
            if [[ ${restore[$name]} == unset ]]; then unset "$name"; else export "$name=${restore[$name]}"; fi
        done
        look || kmq up >/dev/null
    fi
}

# pause STAGE … pause_ends: SIGSTOP, and SIGCONT whatever happens in between
paused=''
pause() {
    paused=$(seen "$1" pid)
    signal STOP "$paused"
}
pause_ends() {
    if [[ $paused ]]; then signal CONT "$paused"; fi
    paused=''
}

# --- messages ----------------------------------------------------------------------------------------------------------

# Lines of stdin to the broker, over plain TCP: nothing of KMQ is needed for it.
send() { cat >"/dev/tcp/$KMQ_HOST/$(port ingress "$KMQ_PORT")"; }

# Messages in a topic when it was fetched: all partitions, all segments.
count() { find "$data/topics/$1" -name '*.log' -exec cat {} + 2>/dev/null | wc -l || true; }

# Seqs that this run added, sorted as text: in the WAL, in a topic, named in dropped.log for the ring `durable`.
new_seqs() { awk -F'|' -v s0="$s0" '$1 + 0 > s0 { print $1 }' "$@" | sort; }
wal_seqs() { new_seqs "$data"/append/*.log; }
queue_seqs() { new_seqs "$data/topics/$1"/*/*.log; }
dropped_seqs() {
    if [[ -e $data/dropped.log ]]; then
        awk -F'|' -v s0="$s0" '$1 == "durable" && $2 > s0 { for (i = $2; i <= $3; i++) printf "%.0f\n", i }' \
            "$data/dropped.log" | sort
    fi
}

# check_wal COUNT: this run added exactly so many records, contiguous, none twice.
check_wal() { check wal "pass_$1" "$(check-gap from=$((s0 + 1)) to=$((s0 + $1)) "$data"/append/*.log |
    awk '{ for (i = 1; i <= NF; i++) { split($i, f, "="); v[f[1]] = f[2] } } END { print v["result"] "_" v["records"] }')"; }

now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }
