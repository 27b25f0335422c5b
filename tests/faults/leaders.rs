//! Leaders: one term after another, whatever befalls the one who leads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fencepost::coordinator::{Campaign, Coordinator, CoordinatorOptions, Leader};
use fencepost::domain::ids::Name;
use fencepost::domain::lease::CampaignOutcome;
use fencepost::domain::time::Ttl;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::rig::{self, Flow, Proxy, expires_at, instant_ms, verdict, wall_ms};
use crate::support::process::Process;
use crate::support::{Client, Kind, Reply, World, eventually};

const NAME: &str = "scheduler";
const TTL: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(200);

/// Where a candidate stands, and as whom.
#[derive(Clone, Debug)]
struct Seat {
    base: String,
    owner: String,
}

/// One `leading`, as the candidate saw it.
#[derive(Clone, Debug)]
struct Led {
    candidate: usize,
    owner: String,
    term: i64,
    sent: Instant,
    returned: Instant,
    /// Until when it may act, by the rule for callers, on its own monotonic clock.
    until: Instant,
    /// By the store's clock.
    acquired_at: i64,
    /// By the store's clock.
    expires_at: i64,
}

/// One `following`: what was told of the one who leads.
#[derive(Clone, Debug)]
struct Followed {
    owner: String,
    term: i64,
    sent: Instant,
    acquired_at: i64,
    expires_at: i64,
}

/// A term that its owner ended.
#[derive(Clone, Copy, Debug)]
struct Resigned {
    term: i64,
    sent: Instant,
    /// By this machine's clock, which is the store's.
    sent_ms: i64,
}

/// What the candidates saw.
#[derive(Debug, Default)]
struct Log {
    led: Mutex<Vec<Led>>,
    followed: Mutex<Vec<Followed>>,
    resigned: Mutex<Vec<Resigned>>,
    /// 409: the term that was to be extended is over.
    over: AtomicUsize,
    /// Resignations by somebody who had just been told that it leads.
    refused: AtomicUsize,
    unanswered: AtomicUsize,
    is_over: AtomicBool,
}

impl Log {
    /// The newest term, and who leads it.
    fn newest(&self) -> Option<Led> {
        self.led.lock().unwrap().iter().max_by_key(|led| (led.term, led.returned)).cloned()
    }

    /// The first `leading` of a term above this one.
    fn next_after(&self, term: i64) -> Option<Led> {
        let led = self.led.lock().unwrap();
        led.iter().filter(|led| led.term > term).min_by_key(|led| led.returned).cloned()
    }
}

/// A candidate as the other side sees it.
struct Candidate {
    seat: watch::Sender<Seat>,
    resigns: Arc<AtomicBool>,
    /// Calls that came back, with an answer or without.
    calls: Arc<AtomicUsize>,
    running: JoinHandle<()>,
}

impl Candidate {
    fn start(number: usize, seat: Seat, log: Arc<Log>) -> Self {
        let (seat, sitting) = watch::channel(seat);
        let (resigns, calls) = (Arc::default(), Arc::default());
        let running =
            tokio::spawn(campaign(number, sitting, Arc::clone(&resigns), Arc::clone(&calls), log));
        Self { seat, resigns, calls, running }
    }

    /// Waits for the end of a call that began after now.
    async fn until_called(&self) {
        let before = self.calls.load(Ordering::Relaxed);
        eventually(|| async { self.calls.load(Ordering::Relaxed) >= before + 2 }).await;
    }
}

/// Asks at each tick whether it leads, as whoever sits in the seat.
async fn campaign(
    candidate: usize,
    mut seat: watch::Receiver<Seat>,
    resigns: Arc<AtomicBool>,
    calls: Arc<AtomicUsize>,
    log: Arc<Log>,
) {
    let http = Client::new(String::new()).http;
    let mut term = None;
    for tick in 0_u64.. {
        if log.is_over.load(Ordering::Relaxed) {
            return;
        }
        let Ok(is_new) = seat.has_changed() else { return };
        if is_new {
            term = None;
        }
        let Seat { base, owner } = seat.borrow_and_update().clone();
        let client = Client { base, http: http.clone() };
        let mut body = json!({"name": NAME, "owner_id": owner, "ttl_ms": TTL.as_millis()});
        // Every other time it asks for its own term only.
        if let Some(term) = term.filter(|_| tick % 2 == 0) {
            body["version"] = json!(term);
        }
        let sent = Instant::now();
        let reply = client.try_post("/v1/leaders/campaign", &body).await;
        let returned = Instant::now();
        match &reply {
            Err(_) => _ = log.unanswered.fetch_add(1, Ordering::Relaxed),
            Ok(reply) => match (reply.status, reply.outcome()) {
                (200, "leading") => {
                    let led = led(candidate, &owner, (sent, returned), reply);
                    term = Some(led.term);
                    log.led.lock().unwrap().push(led);
                }
                (200, "following") => {
                    term = None;
                    log.followed.lock().unwrap().push(followed(sent, reply));
                }
                (409, "stale_lease") => {
                    term = None;
                    log.over.fetch_add(1, Ordering::Relaxed);
                }
                (503, "unavailable") => _ = log.unanswered.fetch_add(1, Ordering::Relaxed),
                _ => panic!("{reply:#?}"),
            },
        }
        calls.fetch_add(1, Ordering::Relaxed);
        if let Some(term) = term.take_if(|_| resigns.swap(false, Ordering::Relaxed)) {
            let resigned = Resigned { term, sent: Instant::now(), sent_ms: wall_ms() };
            log.resigned.lock().unwrap().push(resigned);
            let body = json!({"name": NAME, "owner_id": owner, "version": term});
            let reply = client.post("/v1/leaders/resign", body).await;
            log.refused.fetch_add(usize::from(reply.outcome() != "resigned"), Ordering::Relaxed);
            // Somebody else's turn.
            sleep(5 * TICK).await;
        }
        sleep(TICK).await;
    }
}

fn led(candidate: usize, owner: &str, (sent, returned): (Instant, Instant), reply: &Reply) -> Led {
    let lease = &reply.body["lease"];
    let millis = |value: &serde_json::Value| Duration::from_millis(value.as_u64().unwrap());
    Led {
        candidate,
        owner: owner.to_owned(),
        term: reply.version(),
        sent,
        returned,
        until: sent + millis(&reply.body["elapsed_ms"]) + millis(&lease["expires_in_ms"]),
        acquired_at: instant_ms(lease["acquired_at"].as_str().unwrap()),
        expires_at: expires_at(reply),
    }
}

fn followed(sent: Instant, reply: &Reply) -> Followed {
    let holder = &reply.body["holder"];
    let instant = |member: &str| instant_ms(holder[member].as_str().unwrap());
    Followed {
        owner: holder["owner_id"].as_str().unwrap().to_owned(),
        term: holder["version"].as_i64().unwrap(),
        sent,
        acquired_at: instant("acquired_at"),
        expires_at: instant("expires_at"),
    }
}

/// One term, by all that was told of it.
#[derive(Clone, Debug)]
struct Term {
    owner: String,
    acquired_at: i64,
    /// The latest end that anybody was told.
    expires_at: i64,
    /// When its owner first knew.
    known: Option<Instant>,
    /// When its owner had to stop, by the rule for callers.
    until: Option<Instant>,
    resigned: Option<Resigned>,
}

/// What is wrong with a history of terms.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wrong {
    /// Terms with two owners or two beginnings.
    confused: usize,
    /// Terms that are not above all that were known when they were asked for, or began before
    /// a lower one.
    regressions: usize,
    /// Terms that began before the one before had ended, by the store's clock.
    overlaps: usize,
    /// Candidates that learnt that they lead while another still had the right to act.
    beliefs: usize,
    /// Resignations that were refused.
    refused: usize,
}

fn terms(log: &Log) -> (BTreeMap<i64, Term>, usize) {
    let (mut terms, mut confused) = (BTreeMap::<i64, Term>::new(), 0);
    let mut told = |number: i64, owner: &str, acquired_at: i64, expires_at: i64| {
        let term = terms.entry(number).or_insert_with(|| Term {
            owner: owner.to_owned(),
            acquired_at,
            expires_at,
            known: None,
            until: None,
            resigned: None,
        });
        term.expires_at = term.expires_at.max(expires_at);
        confused += usize::from(term.owner != owner || term.acquired_at != acquired_at);
    };
    let led = log.led.lock().unwrap();
    for reply in &*led {
        told(reply.term, &reply.owner, reply.acquired_at, reply.expires_at);
    }
    for reply in &*log.followed.lock().unwrap() {
        told(reply.term, &reply.owner, reply.acquired_at, reply.expires_at);
    }
    for reply in &*led {
        let term = terms.get_mut(&reply.term).unwrap();
        term.known = Some(term.known.map_or(reply.returned, |known| known.min(reply.returned)));
        term.until = Some(term.until.map_or(reply.until, |until| until.max(reply.until)));
    }
    for resigned in &*log.resigned.lock().unwrap() {
        terms.get_mut(&resigned.term).unwrap().resigned = Some(*resigned);
    }
    (terms, confused)
}

fn check(log: &Log) -> (BTreeMap<i64, Term>, Wrong) {
    let (terms, confused) = terms(log);
    let refused = log.refused.load(Ordering::Relaxed);
    let mut wrong = Wrong { confused, refused, ..Wrong::default() };
    let in_order: Vec<(&i64, &Term)> = terms.iter().collect();
    for pair in in_order.windows(2) {
        let ((_, before), (_, after)) = (pair[0], pair[1]);
        let ended = before.resigned.map_or(before.expires_at, |r| r.sent_ms.min(before.expires_at));
        let is_overlap = after.acquired_at < ended;
        wrong.overlaps += usize::from(is_overlap);
        wrong.regressions += usize::from(after.acquired_at < before.acquired_at);
        if is_overlap {
            println!("overlap: {pair:#?}");
        }
    }
    // The same by what the candidates knew, on this machine's monotonic clock.
    let mut latest: Option<(Instant, &Term)> = None;
    for (_, term) in &in_order {
        if let (Some((until, before)), Some(known)) = (latest, term.known)
            && known < until
        {
            wrong.beliefs += 1;
            println!("both believed for {:?}: {before:#?} and {term:#?}", until - known);
        }
        if let Some(until) = term.until {
            let until = term.resigned.map_or(until, |resigned| until.min(resigned.sent));
            if latest.is_none_or(|(latest, _)| latest < until) {
                latest = Some((until, term));
            }
        }
    }
    let led = log.led.lock().unwrap();
    let mut known: Vec<(Instant, i64)> = led.iter().map(|led| (led.returned, led.term)).collect();
    known.sort_unstable();
    let known_before = |moment: Instant| {
        let known = known.iter().take_while(|(returned, _)| *returned < moment);
        known.map(|(_, term)| *term).max().unwrap_or(0)
    };
    let older = led.iter().filter(|led| led.term < known_before(led.sent)).count();
    let followed = log.followed.lock().unwrap();
    wrong.regressions += older + followed.iter().filter(|f| f.term < known_before(f.sent)).count();
    (terms, wrong)
}

/// What befalls the one who leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Stopped,
    Killed,
    CutOff,
    Unheard,
    Resigned,
}

const FAULTS: [Fault; 8] = [
    Fault::Stopped,
    Fault::Resigned,
    Fault::Killed,
    Fault::CutOff,
    Fault::Resigned,
    Fault::Stopped,
    Fault::Killed,
    Fault::Unheard,
];

/// Three candidates, each with a replica and a way to the database of its own.
struct Election {
    log: Arc<Log>,
    proxies: Vec<Proxy>,
    replicas: Vec<Process>,
    candidates: Vec<Candidate>,
    runs: usize,
}

fn replica(url: &str) -> Process {
    Process::start(url, &["--log", "off"])
}

impl Election {
    async fn begin(world: &World) -> Self {
        let log = Arc::new(Log::default());
        let (mut proxies, mut replicas, mut candidates) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..3 {
            let proxy = Proxy::start(&world.url()).await;
            let url = proxy.url.clone();
            let process = tokio::task::spawn_blocking(move || replica(&url)).await.unwrap();
            let seat = Seat { base: process.base.clone(), owner: format!("run-{number}") };
            candidates.push(Candidate::start(number, seat, Arc::clone(&log)));
            proxies.push(proxy);
            replicas.push(process);
        }
        Self { log, proxies, replicas, candidates, runs: 3 }
    }

    /// Somebody who has just been told that it leads.
    async fn leader(&self) -> Led {
        let since = Instant::now();
        let leads = || self.log.newest().filter(|led| led.sent > since);
        eventually(|| async { leads().is_some() }).await;
        leads().unwrap()
    }

    /// How long it took after `since` until somebody led a later term, but no longer than that
    /// can take: what went wrong instead is for the checks to say.
    async fn handed_over(&self, term: i64, since: Instant) -> Duration {
        let led = eventually(|| async { self.log.next_after(term).is_some() });
        let _ = timeout(5 * TTL, led).await;
        let next = self.log.next_after(term);
        let moment = next.map_or_else(Instant::now, |next| next.returned);
        moment.saturating_duration_since(since)
    }

    /// Lets it happen, and waits until all is well again: how long nobody led.
    async fn befall(&mut self, fault: Fault) -> Duration {
        let Led { candidate, term, .. } = self.leader().await;
        let mut since = Instant::now();
        match fault {
            Fault::Stopped => {
                self.replicas[candidate].signal("STOP");
                sleep(2 * TTL).await;
                self.replicas[candidate].signal("CONT");
            }
            Fault::CutOff | Fault::Unheard => {
                let flow = if fault == Fault::CutOff { Flow::Cut } else { Flow::Held };
                self.proxies[candidate].set(flow);
                sleep(2 * TTL).await;
                self.proxies[candidate].set(Flow::Open);
            }
            Fault::Killed => {
                let url = self.proxies[candidate].url.clone();
                self.replicas[candidate].signal("KILL");
                self.replicas[candidate].wait();
                let process = tokio::task::spawn_blocking(move || replica(&url)).await.unwrap();
                let owner = format!("run-{}", self.runs);
                self.runs += 1;
                let seat = Seat { base: process.base.clone(), owner };
                self.replicas[candidate] = process;
                self.candidates[candidate].seat.send_replace(seat);
            }
            Fault::Resigned => {
                self.candidates[candidate].resigns.store(true, Ordering::Relaxed);
                let resigned = || {
                    let resigned = self.log.resigned.lock().unwrap();
                    resigned.iter().find(|resigned| resigned.term == term).copied()
                };
                eventually(|| async { resigned().is_some() }).await;
                since = resigned().unwrap().sent;
            }
        }
        let took = self.handed_over(term, since).await;
        self.candidates[candidate].until_called().await;
        took
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_one_leads_whatever_befalls_the_leader() {
    let _alone = rig::alone().await;
    let world = World::new(Kind::Postgres).await;
    let mut election = Election::begin(&world).await;
    let end = Instant::now() + Duration::from_secs(55);
    let mut took: BTreeMap<Fault, Vec<Duration>> = BTreeMap::new();
    for fault in FAULTS.into_iter().cycle() {
        if Instant::now() > end {
            break;
        }
        let duration = election.befall(fault).await;
        took.entry(fault).or_default().push(duration);
    }
    let log = Arc::clone(&election.log);
    log.is_over.store(true, Ordering::Relaxed);
    for candidate in election.candidates {
        candidate.running.await.unwrap();
    }
    let (terms, wrong) = check(&log);
    let number = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    println!(
        "figure: three candidates on three replicas, ttl 2 s, for a minute: {} terms, {} times \
         leading, {} times following, {} told that their term is over, {} calls without an answer; \
         {} regressions, {} overlaps by the store's clock, {} by the candidates' own, {} confused",
        terms.len(),
        log.led.lock().unwrap().len(),
        log.followed.lock().unwrap().len(),
        number(&log.over),
        number(&log.unanswered),
        wrong.regressions,
        wrong.overlaps,
        wrong.beliefs,
        wrong.confused,
    );
    let seconds = Duration::from_secs;
    for (fault, durations) in &took {
        let most = durations.iter().max().unwrap();
        let goal = if *fault == Fault::Resigned { seconds(1) } else { TTL + seconds(1) };
        println!(
            "figure: leader {fault:?}, {} times: another led after {} ms at most (goal {} ms: {})",
            durations.len(),
            most.as_millis(),
            goal.as_millis(),
            verdict(most.as_secs_f64(), goal.as_secs_f64()),
        );
    }
    assert_eq!(wrong, Wrong::default());
    assert_eq!(took.len(), 5, "not everything happened");
    for (fault, durations) in took {
        let bound = if fault == Fault::Resigned { seconds(3) } else { TTL + seconds(4) };
        assert!(durations.iter().all(|took| *took <= bound), "{fault:?}: {durations:?}");
    }
}

/// A [`Leader`] that is asked every 20 ms.
struct Asked {
    /// When its answer changed, and to what.
    changes: Arc<Mutex<Vec<(Instant, bool)>>>,
    stop: Arc<AtomicBool>,
    asking: JoinHandle<()>,
}

impl Asked {
    fn start(leader: Arc<Leader>) -> Self {
        let changes: Arc<Mutex<Vec<_>>> = Arc::default();
        let stop: Arc<AtomicBool> = Arc::default();
        let (noted, stopped) = (Arc::clone(&changes), Arc::clone(&stop));
        let asking = tokio::spawn(async move {
            let mut last = false;
            while !stopped.load(Ordering::Relaxed) {
                let leads = leader.is_leader().await;
                if leads != last {
                    noted.lock().unwrap().push((Instant::now(), leads));
                    last = leads;
                }
                sleep(Duration::from_millis(20)).await;
            }
        });
        Self { changes, stop, asking }
    }

    fn leads(&self) -> bool {
        self.changes.lock().unwrap().last().is_some_and(|(_, leads)| *leads)
    }

    /// When it last changed to this.
    fn changed_to(&self, leads: bool) -> Option<Instant> {
        let changes = self.changes.lock().unwrap();
        changes.iter().rev().find(|(_, to)| *to == leads).map(|(at, _)| *at)
    }

    async fn until(&self, leads: bool) {
        eventually(|| async { self.leads() == leads }).await;
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.asking.await.unwrap();
    }
}

/// Two processes' worth of coordinators, each with a way to the database of its own.
struct Pair {
    proxies: Vec<Proxy>,
    coordinators: Vec<Coordinator>,
    leaders: Vec<Arc<Leader>>,
    asked: Vec<Asked>,
    /// Goes last.
    world: World,
}

impl Pair {
    /// The first one leads.
    async fn start() -> Self {
        let world = World::new(Kind::Postgres).await;
        let mut pair = Self {
            proxies: Vec::new(),
            coordinators: Vec::new(),
            leaders: Vec::new(),
            asked: Vec::new(),
            world,
        };
        for _ in 0..2 {
            let proxy = Proxy::start(&pair.world.url()).await;
            let options = CoordinatorOptions::default();
            let coordinator = Coordinator::open(&proxy.url, options).await.unwrap();
            let ttl = Ttl::from_millis(i64::try_from(TTL.as_millis()).unwrap()).unwrap();
            let leader = Arc::new(coordinator.leader(NAME.parse().unwrap()).with_ttl(ttl));
            let asked = Asked::start(Arc::clone(&leader));
            pair.proxies.push(proxy);
            pair.coordinators.push(coordinator);
            pair.leaders.push(leader);
            pair.asked.push(asked);
            pair.asked[0].until(true).await;
        }
        pair
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_without_its_database_steps_down_before_another_steps_up() {
    const ROUNDS: usize = 10;
    let _alone = rig::alone().await;
    let pair = Pair::start().await;
    let (mut gaps, mut up_after, mut last_term) = (Vec::new(), Vec::new(), None);
    for round in 0..ROUNDS {
        let (one, other) = (round % 2, 1 - round % 2);
        pair.asked[one].until(true).await;
        let term = pair.leaders[one].term().await;
        assert!(term > last_term, "terms do not rise");
        last_term = term;
        // At any moment of its term, not just after it began.
        sleep(Duration::from_millis(rand::random_range(0..1_000))).await;
        let cut = Instant::now();
        pair.proxies[one].set(if round % 4 < 2 { Flow::Held } else { Flow::Cut });
        pair.asked[other].until(true).await;
        let up = pair.asked[other].changed_to(true).unwrap();
        pair.asked[one].until(false).await;
        let down = pair.asked[one].changed_to(false).unwrap();
        assert!(down > cut, "it did not lead when it was cut off");
        assert!(down < up, "both said yes for {:?}", down - up);
        gaps.push(up - down);
        up_after.push(up - cut);
        pair.proxies[one].set(Flow::Open);
    }
    println!(
        "figure: a leader cut off from its database, ttl 2 s, {ROUNDS} rounds: it said no {} to {} \
         ms before the other said yes, which was {} ms after the cut at most",
        gaps.iter().min().unwrap().as_millis(),
        gaps.iter().max().unwrap().as_millis(),
        up_after.iter().max().unwrap().as_millis(),
    );
    for coordinator in &pair.coordinators {
        coordinator.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_closes_hands_over_at_once() {
    let _alone = rig::alone().await;
    let mut pair = Pair::start().await;
    pair.asked.remove(0).stop().await;
    let closed = Instant::now();
    pair.coordinators[0].close().await;
    let took = closed.elapsed();
    pair.asked[0].until(true).await;
    let up = pair.asked[0].changed_to(true).unwrap().saturating_duration_since(closed);
    println!(
        "figure: close() of the leader took {} ms, the other led {} ms after its begin (goal 1,000 \
         ms: {})",
        took.as_millis(),
        up.as_millis(),
        verdict(up.as_secs_f64(), 1.0),
    );
    assert!(up <= Duration::from_secs(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_closes_says_no_before_another_says_yes() {
    let _alone = rig::alone().await;
    let pair = Pair::start().await;
    let closed = Instant::now();
    pair.coordinators[0].close().await;
    pair.asked[1].until(true).await;
    pair.asked[0].until(false).await;
    let after = |at: Option<Instant>| at.unwrap().saturating_duration_since(closed).as_millis();
    let (down, up) = (pair.asked[0].changed_to(false), pair.asked[1].changed_to(true));
    println!(
        "figure: close() of a leader that is still asked: it says no after {} ms, the other yes \
         after {} ms",
        after(down),
        after(up),
    );
    assert!(down < up, "both said yes");
    assert!(after(up) <= 3_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_closed_leads_nothing_although_it_is_still_asked() {
    const NAMES: usize = 200;
    let _alone = rig::alone().await;
    let world = World::new(Kind::Postgres).await;
    let open = async || {
        let options = CoordinatorOptions::default();
        Coordinator::open_dsn(&world.dsn(), options).await.unwrap()
    };
    let (one, other) = (open().await, open().await);
    let asked: Vec<Asked> = (0..NAMES)
        .map(|number| {
            let leader = one.leader(format!("{NAME}-{number}").parse().unwrap());
            Asked::start(Arc::new(leader.with_ttl(Ttl::from_millis(3_000).unwrap())))
        })
        .collect();
    for asked in &asked {
        asked.until(true).await;
    }
    // Until they ask at different moments.
    sleep(Duration::from_secs(2)).await;
    let closed = Instant::now();
    one.close().await;
    let took = closed.elapsed();
    let led = other.leaders().list(None, Some(true), None, 1_000).await.unwrap();
    let names: Vec<&str> = led.items.iter().map(|(name, _)| name.as_str()).collect();
    println!(
        "figure: close() of the leader of {NAMES} names, all still asked every 20 ms, took {} ms \
         and left {} of them led",
        took.as_millis(),
        names.len(),
    );
    for asked in asked {
        asked.stop().await;
    }
    other.close().await;
    assert!(names.is_empty(), "still led, by nobody: {names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resigned_term_is_over_for_the_whole_process() {
    let _alone = rig::alone().await;
    let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await.unwrap();
    let name: Name = NAME.parse().unwrap();
    let (one, another) = (coordinator.leader(name.clone()), coordinator.leader(name.clone()));
    assert!(one.is_leader().await && another.is_leader().await);
    one.resign().await.unwrap();
    let rival = Campaign {
        owner_id: "rival".parse().unwrap(),
        version: None,
        ttl: Ttl::LEADER,
        metadata: None,
        wait: Duration::ZERO,
    };
    let reply = coordinator.leaders().campaign(&name, rival).await.unwrap().keep().0;
    assert!(matches!(reply, CampaignOutcome::Leading { is_new: true, .. }), "{reply:?}");
    let says = another.is_leader().await;
    println!("figure: resigned by one handle, led by a rival: another handle says {says}");
    assert!(!says, "two lead");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_leader_costs_three_writes_per_ttl() {
    const TTL_MS: u64 = 3_000;
    const TTLS: u64 = 40;
    const STORES: &str = "fencepost_store_call_duration_seconds_count{operation=\"store\"}";
    const LOADS: &str = "fencepost_store_call_duration_seconds_count{operation=\"load\"}";
    let _alone = rig::alone().await;
    let world = World::new(Kind::Postgres).await;
    let options = CoordinatorOptions {
        cleanup_interval: Duration::from_hours(1),
        ..CoordinatorOptions::default()
    };
    let services = rig::replicas(&world, &options, None).await;
    let count = |name: &'static str| {
        let clients: Vec<Client> = services.iter().map(|service| service.client.clone()).collect();
        async move {
            let mut sum = 0.0;
            for client in clients {
                // Absent before the first.
                sum += Some(client.metric(name).await).filter(|n| !n.is_nan()).unwrap_or(0.0);
            }
            sum
        }
    };
    // So that no race for the first term is counted.
    let first = json!({"name": NAME, "owner_id": "run-0", "ttl_ms": TTL_MS});
    services[0].post("/v1/leaders/campaign", first).await.expect("leading");
    let is_over = Arc::new(AtomicBool::new(false));
    let campaigners: Vec<_> = (0..10)
        .map(|number| {
            let client = services[number % services.len()].client.clone();
            let is_over = Arc::clone(&is_over);
            tokio::spawn(async move {
                let (mut terms, mut calls) = (Vec::new(), 0);
                while !is_over.load(Ordering::Relaxed) {
                    let body = json!({"name": NAME, "owner_id": format!("run-{number}"),
                                      "ttl_ms": TTL_MS});
                    let reply = client.post("/v1/leaders/campaign", body).await;
                    calls += 1;
                    match reply.outcome() {
                        "leading" => terms.push(reply.version()),
                        "following" => {}
                        other => panic!("{other}: {reply:#?}"),
                    }
                    sleep(TICK).await;
                }
                (terms, calls)
            })
        })
        .collect();
    let mut stores = Vec::new();
    let started = Instant::now();
    for _ in 0..TTLS {
        let before = count(STORES).await;
        sleep(Duration::from_millis(TTL_MS)).await;
        stores.push(count(STORES).await - before);
    }
    let (all, loads) = (count(STORES).await, count(LOADS).await);
    let ttls = started.elapsed().as_secs_f64() * 1_000.0 / TTL_MS as f64;
    is_over.store(true, Ordering::Relaxed);
    let (mut terms, mut calls) = (Vec::new(), 0);
    for campaigner in campaigners {
        let (led, asked) = campaigner.await.unwrap();
        terms.extend(led);
        calls += asked;
    }
    terms.sort_unstable();
    terms.dedup();
    println!(
        "figure: ten campaigners, ttl 3 s, {ttls:.1} ttls: {calls} campaigns, {loads} loads, {all} \
         writes, that is {:.2} in a ttl (bound 3), {} in the busiest one; {} terms",
        all / ttls,
        stores.iter().copied().fold(0.0, f64::max),
        terms.len(),
    );
    assert_eq!(terms.len(), 1, "an idle leader lost its term");
    // The first one begins the term.
    assert!(all > 1.0 && all <= 3.0 * ttls + 1.0);
}
