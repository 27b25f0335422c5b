//! `/v1/leaders`: exactly one replica runs the scheduler.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::leases::{DEFAULT_WAIT, ForceReleaseResult, WaitResult};
use super::openapi::{NotLeader, OwnershipLost, Problems, ReadProblems};
use super::problem::Problem;
use super::request::{Limit, Metadata, Optional, Required, Strict, StrictQuery, WaitMs, request};
use super::router::{App, Received};
use super::shape::{
    Holder, LeaseBody, Subject, audit, instant, metadata, millis, ok, polling_hint, stale_lease,
};
use super::token::PageToken;
use crate::coordinator::Campaign;
use crate::domain::ids::{Kind, Name, OwnerId, Prefix, Reason};
use crate::domain::lease::{CampaignOutcome, Lease, ReleaseOutcome};
use crate::domain::time::Ttl;
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreClock;

/// The routes.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(campaign_for_leader))
        .routes(routes!(resign_leader))
        .routes(routes!(wait_for_leader))
        .routes(routes!(get_leader_state))
        .routes(routes!(check_leader_gate))
        .routes(routes!(list_leaders))
        .routes(routes!(force_release_leader))
}

request! {
    /// A wish to lead, or to go on leading.
    body CampaignForLeaderRequest {
        /// What to lead: 1 to 512 bytes.
        #[schema(min_length = 1, max_length = 512)]
        name: Required<Name> as String,
        /// Who asks: 1 to 256 bytes, unique to one run of one process. A host name is not: two
        /// processes with one id would both be told that they lead.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// Extend this term only: if it is over, learn that with 409 instead of beginning another.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
        /// How long to lead from now on. If left out, 15000.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
        /// How long to stay in line if another leads. If left out, 0: answer at once.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
        /// Strings to show to others, at most 4,096 bytes as compact JSON.
        metadata: Optional<Metadata> as Option<BTreeMap<String, String>>,
    }
}

/// The answer to a campaign.
#[derive(Serialize, ToSchema)]
struct CampaignResult {
    /// `leading` or `following`. More may be added.
    #[schema(example = "leading")]
    outcome: &'static str,
    /// With `leading`; its version is the term.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseBody>,
    /// With `following`.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    /// With `following`: a hint for callers that poll.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1_000)]
    retry_after_ms: Option<i64>,
    /// The server's time from receiving the request to writing this. On the caller's monotonic
    /// clock, it leads until send time + `elapsed_ms` + `lease.expires_in_ms`.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Lead, or go on leading
///
/// "Am I the leader?", to be asked at every tick: takes the leadership if nobody has it, and
/// extends it if the caller has. While more than two thirds of the ttl remain, nothing is written.
/// The version is the term: it stays the same while the term is extended, and is higher for every
/// new one, the caller's own included.
#[utoipa::path(
    post, path = "/v1/leaders/campaign", operation_id = "campaignForLeader", tag = "leaders",
    request_body(content = CampaignForLeaderRequest, example = json!({
        "name": "scheduler", "owner_id": "run-7f3a", "ttl_ms": 15_000
    })),
    responses(
        (status = 200, description = "Who leads now.", body = CampaignResult,
         example = json!({
            "outcome": "leading",
            "lease": {
                "name": "scheduler", "owner_id": "run-7f3a", "version": 1_796_025_600_000_000_i64,
                "ttl_ms": 15_000, "acquired_at": "2026-11-30T12:00:00.000Z",
                "expires_at": "2026-11-30T12:00:15.000Z", "expires_in_ms": 14_998,
                "renew_after_ms": 5_000
            },
            "elapsed_ms": 2
         })),
        Problems,
        OwnershipLost
    )
)]
async fn campaign_for_leader(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<CampaignForLeaderRequest>,
) -> Result<Response, Problem> {
    let CampaignForLeaderRequest { name, owner_id, version, ttl_ms, wait_ms, metadata } = request;
    let wish = Campaign {
        owner_id,
        version,
        ttl: ttl_ms.unwrap_or(Ttl::LEADER),
        metadata: metadata.map(|Metadata(text)| text),
        wait: wait_ms.map_or(Duration::ZERO, WaitMs::duration),
    };
    let reply = app.coordinator.leaders().campaign(&name, wish).await?;
    let (outcome, clock) = reply.keep();
    let elapsed_ms = received.elapsed_ms();
    match outcome {
        CampaignOutcome::Leading { lease, .. } => Ok(ok(CampaignResult {
            outcome: "leading",
            lease: Some(LeaseBody::new(Subject::Leader(&name), &lease, clock)),
            holder: None,
            retry_after_ms: None,
            elapsed_ms,
        })),
        CampaignOutcome::Following(lease) => {
            let holder = Holder::new(&lease, clock);
            Ok(ok(CampaignResult {
                outcome: "following",
                lease: None,
                retry_after_ms: Some(polling_hint(holder.expires_in_ms)),
                holder: Some(holder),
                elapsed_ms,
            }))
        }
        CampaignOutcome::Free => {
            Err(EngineError::Internal("a campaign was not decided".into()).into())
        }
        CampaignOutcome::Stale(stale) => Err(stale_lease(Kind::Leader, &stale, clock)),
    }
}

request! {
    /// A term to end.
    body ResignLeaderRequest {
        /// What is led.
        #[schema(min_length = 1, max_length = 512)]
        name: Required<Name> as String,
        /// Who leads.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The term.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// The answer to a resignation.
#[derive(Serialize, ToSchema)]
struct ResignResult {
    /// `resigned`. More may be added.
    #[schema(example = "resigned")]
    outcome: &'static str,
}

/// Resign
///
/// Ends the term, and wakes those that wait to lead. An old term cannot end a newer one. Repeated
/// with the same reference, it succeeds again until the next term.
#[utoipa::path(
    post, path = "/v1/leaders/resign", operation_id = "resignLeader", tag = "leaders",
    request_body(content = ResignLeaderRequest, example = json!({
        "name": "scheduler", "owner_id": "run-7f3a", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "The term is over.", body = ResignResult,
         example = json!({"outcome": "resigned"})),
        Problems,
        OwnershipLost
    )
)]
async fn resign_leader(
    State(app): State<Arc<App>>,
    Strict(request): Strict<ResignLeaderRequest>,
) -> Result<Response, Problem> {
    let ResignLeaderRequest { name, owner_id, version } = request;
    match app.coordinator.leaders().resign(&name, &owner_id, version).await?.keep() {
        (ReleaseOutcome::Released, _) => Ok(ok(ResignResult { outcome: "resigned" })),
        (ReleaseOutcome::Stale(stale), clock) => Err(stale_lease(Kind::Leader, &stale, clock)),
    }
}

request! {
    /// A term to wait for the end of.
    body WaitForLeaderRequest {
        /// What is led.
        #[schema(min_length = 1, max_length = 512)]
        name: Required<Name> as String,
        /// The term to watch. If left out, the present one.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
        /// How long to wait. If left out, 20000.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
    }
}

/// Wait for the end of a term
///
/// As `waitForLease` does for a lease.
#[utoipa::path(
    post, path = "/v1/leaders/wait", operation_id = "waitForLeader", tag = "leaders",
    request_body(content = WaitForLeaderRequest, example = json!({
        "name": "scheduler", "version": 1_796_025_600_000_000_i64, "wait_ms": 20_000
    })),
    responses(
        (status = 200, description = "Whether the term is over.", body = WaitResult,
         example = json!({"outcome": "released", "reason": "expired", "elapsed_ms": 840})),
        Problems
    )
)]
async fn wait_for_leader(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<WaitForLeaderRequest>,
) -> Result<Response, Problem> {
    let WaitForLeaderRequest { name, version, wait_ms } = request;
    let wait = wait_ms.unwrap_or(DEFAULT_WAIT).duration();
    let reply = app.coordinator.leaders().wait(&name, version, wait).await?;
    Ok(ok(WaitResult::new(reply, &received)))
}

request! {
    /// A leadership to look at.
    query GetLeaderStateQuery {
        /// What is led.
        #[param(min_length = 1, max_length = 512, example = "scheduler")]
        name: Required<Name> as String,
    }
}

/// Who leads.
#[derive(Serialize, ToSchema)]
struct LeaderState {
    /// What is led.
    name: String,
    /// `led` or `vacant`. More may be added.
    #[schema(example = "led")]
    state: &'static str,
    /// The newest term, present or past; absent for a name not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// With `led`.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_id: Option<String>,
    /// With `led`: since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    acquired_at: Option<String>,
    /// With `led`: until when, unless extended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// With `led`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
    /// With `led`, if the leader gave any.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    metadata: Option<Box<RawValue>>,
}

impl LeaderState {
    fn new(name: &Name, lease: Option<&Lease>, is_led: bool, clock: StoreClock) -> Self {
        let led = lease.filter(|_| is_led);
        Self {
            name: name.as_str().to_owned(),
            state: if is_led { "led" } else { "vacant" },
            version: lease.map(|lease| lease.version.get()),
            owner_id: led.map(|lease| lease.owner_id.as_str().to_owned()),
            acquired_at: led.map(|lease| instant(lease.acquired_at)),
            expires_at: led.map(|lease| instant(lease.expires_at)),
            expires_in_ms: led.map(|lease| millis(clock.remaining(lease.expires_at))),
            metadata: led.and_then(metadata),
        }
    }
}

/// Look who leads
///
/// Never 404: a name that nobody campaigned for is `vacant`.
#[utoipa::path(
    get, path = "/v1/leaders/state", operation_id = "getLeaderState", tag = "leaders",
    params(GetLeaderStateQuery),
    responses(
        (status = 200, description = "Who leads.", body = LeaderState,
         example = json!({"name": "scheduler", "state": "vacant"})),
        ReadProblems
    )
)]
async fn get_leader_state(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<GetLeaderStateQuery>,
) -> Result<Response, Problem> {
    let (lease, clock) = app.coordinator.leaders().state(&query.name).await?.keep();
    let is_led = lease.as_ref().is_some_and(|lease| lease.is_held(clock.estimate()));
    Ok(ok(LeaderState::new(&query.name, lease.as_ref(), is_led, clock)))
}

request! {
    /// Whether somebody leads.
    query CheckLeaderGateQuery {
        /// What is led.
        #[param(min_length = 1, max_length = 512, example = "scheduler")]
        name: Required<Name> as String,
        /// Who may be leading.
        #[param(min_length = 1, max_length = 256, example = "run-7f3a")]
        owner_id: Required<OwnerId> as String,
    }
}

/// The owner leads.
#[derive(Serialize, ToSchema)]
struct GateResult {
    /// `leading`. More may be added.
    #[schema(example = "leading")]
    outcome: &'static str,
    /// The term.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: i64,
    /// How long the term lasts unless it is extended.
    #[schema(minimum = 0)]
    expires_in_ms: i64,
}

/// Check whether an owner leads
///
/// For probes and load balancers, which look at the status alone: 200 if that owner leads now,
/// else 409 `not_leader`. It takes nothing and extends nothing.
#[utoipa::path(
    get, path = "/v1/leaders/gate", operation_id = "checkLeaderGate", tag = "leaders",
    params(CheckLeaderGateQuery),
    responses(
        (status = 200, description = "The owner leads.", body = GateResult,
         example = json!({
            "outcome": "leading", "version": 1_796_025_600_000_000_i64, "expires_in_ms": 9_300
         })),
        ReadProblems,
        NotLeader
    )
)]
async fn check_leader_gate(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<CheckLeaderGateQuery>,
) -> Result<Response, Problem> {
    let reply = app.coordinator.leaders().gate(&query.name, &query.owner_id).await?;
    let (lease, clock) = reply.keep();
    let lease = lease.ok_or_else(Problem::not_leader)?;
    Ok(ok(GateResult {
        outcome: "leading",
        version: lease.version.get(),
        expires_in_ms: millis(clock.remaining(lease.expires_at)),
    }))
}

/// A filter on `led` or `vacant`.
enum LedOrVacant {
    Led,
    Vacant,
}

impl super::request::Field for LedOrVacant {
    fn from_json(_json: &RawValue) -> Result<Self, String> {
        Err("must be a query parameter".to_owned())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "led" => Ok(Self::Led),
            "vacant" => Ok(Self::Vacant),
            _ => Err("must be led or vacant".to_owned()),
        }
    }
}

request! {
    /// Which leaderships to list.
    query ListLeadersQuery {
        /// Only names that begin with this.
        #[param(max_length = 512, example = "sched")]
        prefix: Optional<Prefix> as Option<String>,
        /// Only those in this state: `led` or `vacant`.
        #[param(example = "led")]
        state: Optional<LedOrVacant> as Option<String>,
        /// At most this many items. If left out, 100.
        #[param(minimum = 1, maximum = 1_000)]
        limit: Optional<Limit> as Option<i32>,
        /// The `next_page_token` of the page before.
        page_token: Optional<PageToken> as Option<String>,
    }
}

/// One page of a list.
#[derive(Serialize, ToSchema)]
struct ListLeadersResult {
    /// Names in the order of their bytes. A page can be short, even empty, and not be the last.
    items: Vec<LeaderState>,
    /// For the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// List leaderships
///
/// Those that are led, and those that were and are not forgotten yet.
#[utoipa::path(
    get, path = "/v1/leaders", operation_id = "listLeaders", tag = "leaders",
    params(ListLeadersQuery),
    responses(
        (status = 200, description = "A page of leaderships.", body = ListLeadersResult,
         example = json!({"items": [{"name": "scheduler", "state": "vacant"}]})),
        ReadProblems
    )
)]
async fn list_leaders(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<ListLeadersQuery>,
) -> Result<Response, Problem> {
    let ListLeadersQuery { prefix, state, limit, page_token } = query;
    let led = state.map(|state| matches!(state, LedOrVacant::Led));
    let after = page_token.map(|PageToken(name)| name);
    let limit = limit.unwrap_or(Limit::DEFAULT).0 as usize;
    let page = app.coordinator.leaders().list(prefix, led, after, limit).await?;
    let items = page.items.iter().map(|(name, lease)| {
        LeaderState::new(name, Some(lease), lease.is_held(page.clock.now), page.clock)
    });
    Ok(ok(ListLeadersResult {
        items: items.collect(),
        next_page_token: page.next.map(|name| PageToken(name).to_string()),
    }))
}

request! {
    /// A term to end by force.
    body ForceReleaseLeaderRequest {
        /// What is led.
        #[schema(min_length = 1, max_length = 512)]
        name: Required<Name> as String,
        /// Why, for the audit log.
        #[schema(min_length = 1, max_length = 512)]
        reason: Required<Reason> as String,
        /// End only this term, so that a newer one is left alone.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
    }
}

/// End a term by force
///
/// For an operator, when the leader is known to be gone. Its next campaign for that term gets 409
/// `stale_lease` with `reason: revoked`. Logged with its reason.
#[utoipa::path(
    post, path = "/v1/leaders/force-release", operation_id = "forceReleaseLeader", tag = "leaders",
    request_body(content = ForceReleaseLeaderRequest, example = json!({
        "name": "scheduler", "reason": "its host was scrapped"
    })),
    responses(
        (status = 200, description = "Whether a term was ended.", body = ForceReleaseResult,
         example = json!({"outcome": "released", "version": 1_796_025_600_000_000_i64})),
        Problems
    )
)]
async fn force_release_leader(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ForceReleaseLeaderRequest>,
) -> Result<Response, Problem> {
    let ForceReleaseLeaderRequest { name, reason, version } = request;
    let (outcome, _) = app.coordinator.leaders().force_release(&name, version).await?.keep();
    let result = ForceReleaseResult::from(outcome);
    audit("force_release_leader", &name, &reason, &result, &received);
    Ok(ok(result))
}
