//! What a write rests on besides its row: the store takes it at the right time only, and a replica
//! that remembers too much is corrected by it.

use std::sync::Arc;
use std::time::Duration;

use fencepost::coordinator::{ClaimLease, Coordinator, CoordinatorOptions};
use fencepost::domain::ids::{Key, Kind as KeyKind, Namespace, Scope};
use fencepost::domain::lease::{ClaimOutcome, Lease, LeaseMachine, Reference, Status};
use fencepost::domain::time::{Timestamp, Ttl};
use fencepost::domain::version::Version;
use fencepost::engine::Hub;
use fencepost::store::postgres::PostgresStore;
use fencepost::store::{Moment, Row, Store, Stored, Write};

use sqlx::Connection as _;
use tokio::time::timeout;

use crate::support::{Kind, World};

const LANE: usize = 0;

fn key(name: &str) -> Key {
    Key::new(KeyKind::Lease, &Namespace::default_namespace(), &Scope::none(), name)
}

fn write(name: &str, now: Timestamp) -> Write<Lease> {
    let revision = Version::next(None, 0, now).unwrap();
    let ttl = Ttl::from_millis(60_000).unwrap();
    let state = Lease {
        version: revision,
        status: Status::Held,
        owner_id: "a".parse().unwrap(),
        attempt_id: None,
        grant_id: 1,
        ttl,
        acquired_at: now,
        expires_at: now.after(ttl),
        recovered_from: None,
        metadata: None,
    };
    Write { key: key(name), expected: None, row: Row { revision, state } }
}

async fn open(world: &World) -> PostgresStore {
    let (waker, metrics) = (Arc::new(Hub::default()) as _, Arc::default());
    PostgresStore::open(&[world.url()], None, true, waker, metrics).await.unwrap()
}

async fn store(
    store: &dyn Store<LeaseMachine>,
    moment: Moment,
    writes: Vec<Write<Lease>>,
) -> Vec<bool> {
    // Nothing here waits for a lock.
    let storing = timeout(Duration::from_secs(2), store.store(LANE, moment, writes.into()));
    let stored = storing.await.expect("a write waited");
    let is_accepted = |stored| match stored {
        Stored::Accepted => true,
        Stored::NotAccepted => false,
        other @ Stored::Failed(_) => panic!("{other:?}"),
    };
    stored.into_iter().map(is_accepted).collect()
}

async fn is_accepted(to: &dyn Store<LeaseMachine>, moment: Moment, name: &str) -> bool {
    store(to, moment, vec![write(name, moment.clock.now)]).await == [true]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_rests_on_another_time_than_the_store_has_is_not_accepted() {
    let world = World::new(Kind::Postgres).await;
    let opened = open(&world).await;
    let store: &dyn Store<LeaseMachine> = &opened;
    assert!(store.known(LANE).await.is_none(), "something is known before anything was loaded");
    let loaded = store.load(LANE, &[key("k")]).await.unwrap().moment;
    assert!(is_accepted(store, loaded, "loaded").await);
    let known = store.known(LANE).await.expect("nothing is known right after a load");
    assert!(is_accepted(store, known, "known").await);
    assert!(!is_accepted(store, known, "known").await, "twice");

    let late = Moment { until: Some(known.clock.now), ..known };
    assert!(!is_accepted(store, late, "late").await, "after its time");
    let mut early = known;
    early.clock.now = known.clock.now.plus(Duration::from_mins(1));
    early.until = Some(early.clock.now.plus(Duration::from_mins(1)));
    assert!(!is_accepted(store, early, "early").await, "before its time");
    assert!(store.load(LANE, &[key("late"), key("early")]).await.unwrap().rows == [None, None]);
}

/// A lone row goes by a statement of its own.
#[tokio::test(flavor = "multi_thread")]
async fn one_row_and_several_are_written_by_the_same_rules() {
    let world = World::new(Kind::Postgres).await;
    let opened = open(&world).await;
    let to: &dyn Store<LeaseMachine> = &opened;
    let mut session = world.database.as_ref().unwrap().connect().await;
    for count in [1, 3] {
        let moment = to.load(LANE, &[key("k")]).await.unwrap().moment;
        let now = moment.clock.now;
        let late = Moment { until: Some(now), ..moment };
        let (all, none) = (vec![true; count], vec![false; count]);
        let insert = |what: &str, i| write(&format!("{what} {count} {i}"), now);
        let inserts = |what| (0..count).map(|i| insert(what, i)).collect::<Vec<_>>();
        let update = |mut write: Write<Lease>, expected: Version| {
            write.expected = Some(expected);
            write.row.revision = Version::next(Some(expected), 0, now).unwrap();
            write
        };
        let inserted = inserts("k");
        let updates: Vec<_> =
            inserted.iter().map(|write| update(write.clone(), write.row.revision)).collect();

        // What is not there cannot be updated, what is there not inserted, and neither too late.
        assert_eq!(store(to, moment, updates.clone()).await, none);
        assert_eq!(store(to, late, inserted.clone()).await, none);
        assert_eq!(store(to, moment, inserted.clone()).await, all);
        assert_eq!(store(to, moment, inserted.clone()).await, none);
        assert_eq!(store(to, late, updates.clone()).await, none);

        // Rows that somebody else has locked are left out.
        let mut lock = session.begin().await.unwrap();
        let rows = "SELECT FROM fencepost.leases FOR UPDATE";
        sqlx::raw_sql(rows).execute(&mut *lock).await.unwrap();
        assert_eq!(store(to, moment, updates.clone()).await, none);
        lock.rollback().await.unwrap();

        // Of several, each by its own revision.
        let mut mixed = updates.clone();
        mixed[count - 1].expected = Some(updates[0].row.revision);
        let mut accepted = all.clone();
        accepted[count - 1] = false;
        assert_eq!(store(to, moment, mixed).await, accepted);
        let mut rest = none.clone();
        rest[count - 1] = true;
        assert_eq!(store(to, moment, updates.clone()).await, rest);
        let keys: Vec<Key> = inserted.iter().map(|write| write.key.clone()).collect();
        let rows = to.load(LANE, &keys).await.unwrap().rows;
        assert!(
            rows.into_iter().zip(&updates).all(|(row, write)| row.as_ref() == Some(&write.row))
        );

        // New keys start above the floor, and do not wait while clean-up has it.
        let mut lock = session.begin().await.unwrap();
        let floor = "SELECT FROM fencepost.floor FOR UPDATE";
        sqlx::raw_sql(floor).execute(&mut *lock).await.unwrap();
        assert_eq!(store(to, moment, inserts("floor")).await, none);
        lock.rollback().await.unwrap();
        let above = now.plus(Duration::from_mins(1)).as_micros();
        let mut raised = session.begin().await.unwrap();
        let raise = "UPDATE fencepost.floor SET floor = $1";
        sqlx::query(raise).bind(above).execute(&mut *raised).await.unwrap();
        raised.commit().await.unwrap();
        assert_eq!(store(to, moment, inserts("floor")).await, none);
        sqlx::query(raise).bind(0_i64).execute(&mut session).await.unwrap();
        assert_eq!(store(to, moment, inserts("floor")).await, all);
    }
}

/// Behind a pooler, a statement may meet a session that somebody else has left. This trigger leaves
/// each like that.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_durable_whatever_its_session_was_set_to() {
    let world = World::new(Kind::Postgres).await;
    let opened = open(&world).await;
    let to: &dyn Store<LeaseMachine> = &opened;
    let mut session = world.database.as_ref().unwrap().connect().await;
    let trigger = "
        CREATE TABLE seen (setting text);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.seen VALUES (current_setting('synchronous_commit'));
            PERFORM set_config('synchronous_commit', 'off', false);
            RETURN NULL;
        END $$;
        CREATE TRIGGER look AFTER INSERT OR UPDATE ON fencepost.leases
            FOR EACH STATEMENT EXECUTE FUNCTION look()";
    sqlx::raw_sql(trigger).execute(&mut session).await.unwrap();
    let moment = to.load(LANE, &[key("k")]).await.unwrap().moment;
    let now = moment.clock.now;
    for count in [1, 3] {
        for round in ["a", "b"] {
            let names = (0..count).map(|i| format!("{round} {count} {i}"));
            let mut writes: Vec<_> = names.map(|name| write(&name, now)).collect();
            assert_eq!(store(to, moment, writes.clone()).await, vec![true; count]);
            for write in &mut writes {
                write.expected = Some(write.row.revision);
                write.row.revision = Version::next(write.expected, 0, now).unwrap();
            }
            assert_eq!(store(to, moment, writes).await, vec![true; count]);
        }
    }
    let seen: Vec<String> =
        sqlx::query_scalar("SELECT setting FROM seen").fetch_all(&mut session).await.unwrap();
    assert_eq!(seen, vec!["on"; 8]);
}

/// Each remembers a key as it left it, while the other goes on with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_remembers_a_key_as_free_does_not_grant_what_another_holds() {
    let world = World::new(Kind::Postgres).await;
    let open =
        || async { Coordinator::open(&world.url(), CoordinatorOptions::default()).await.unwrap() };
    let (one, two) = (open().await, open().await);
    let name = "k".parse().unwrap();
    let wish =
        |owner: &str| ClaimLease::new(owner.parse().unwrap(), Ttl::from_millis(60_000).unwrap());
    let claim = async |replica: &Coordinator, owner: &str| {
        let reply = replica.leases().claim(&name, wish(owner)).await.unwrap();
        match reply.keep().0 {
            ClaimOutcome::Claimed { lease, .. } => Some(lease),
            ClaimOutcome::Held(_) => None,
            other => panic!("{other:?}"),
        }
    };
    let release = async |replica: &Coordinator, lease: &Lease| {
        let reference = Reference { owner_id: lease.owner_id.clone(), version: lease.version };
        replica.leases().release(&name, reference).await.unwrap();
    };
    let mut last = 0;
    for _ in 0..50 {
        for (holder, other) in [(&one, &two), (&two, &one)] {
            let lease = claim(holder, "holder").await.expect("not granted, though free");
            assert!(lease.version.get() > last);
            last = lease.version.get();
            assert_eq!(claim(other, "other").await, None);
            assert_eq!(claim(holder, "other").await, None);
            release(holder, &lease).await;
        }
    }
    // Never met by this one, and held.
    let lease = claim(&one, "holder").await.unwrap();
    let three = open().await;
    three.leases().claim(&"another".parse().unwrap(), wish("a")).await.unwrap().keep();
    assert_eq!(claim(&three, "other").await, None);
    release(&three, &lease).await;
    assert!(claim(&one, "other").await.is_some());
}
