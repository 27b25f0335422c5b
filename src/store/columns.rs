//! How rows are spelt in the columns of both SQL stores.

use bytes::Bytes;
use uuid::Uuid;

use super::Row;
use crate::domain::ids::{Binding, CorrelationId, OwnerId};
use crate::domain::lease::{Ending, Lease, Status};
use crate::domain::record::{Completion, Content, Record};
use crate::domain::time::{Timestamp, Ttl};
use crate::domain::version::Version;

/// The columns that a claim has in every table, in the order in which all statements name them.
#[derive(Debug)]
pub(super) struct LeaseColumns {
    pub(super) revision: i64,
    pub(super) version: i64,
    pub(super) status: i16,
    pub(super) owner_id: String,
    pub(super) attempt_id: Option<Uuid>,
    pub(super) grant_id: i64,
    pub(super) ttl_ms: i64,
    pub(super) acquired_at: i64,
    pub(super) expires_at: i64,
    pub(super) recovered_from: Option<i64>,
    pub(super) metadata: Option<String>,
}

impl LeaseColumns {
    /// How many there are.
    pub(super) const COUNT: usize = 11;
}

/// The columns that a record has besides.
#[derive(Debug)]
pub(super) struct RecordColumns {
    pub(super) binding: Option<String>,
    pub(super) correlation_id: Option<String>,
    pub(super) completed_at: Option<i64>,
    pub(super) retained_until: Option<i64>,
    pub(super) content: Option<String>,
    pub(super) body: Option<Vec<u8>>,
}

/// The number that stands for a status.
pub(super) const fn status_number(status: Status) -> i16 {
    match status {
        Status::Held => 0,
        Status::Ended(Ending::Released) => 1,
        Status::Ended(Ending::Expired) => 2,
        Status::Ended(Ending::Revoked) => 3,
        Status::Ended(Ending::Undone) => 4,
        Status::Ended(Ending::Completed) => 5,
        Status::Ended(Ending::Put) => 6,
    }
}

/// The status that a number stands for. One that this version does not know, written by a later
/// one, is some way of not being held.
const fn status(number: i16) -> Status {
    match number {
        0 => Status::Held,
        1 => Status::Ended(Ending::Released),
        3 => Status::Ended(Ending::Revoked),
        4 => Status::Ended(Ending::Undone),
        5 => Status::Ended(Ending::Completed),
        6 => Status::Ended(Ending::Put),
        _ => Status::Ended(Ending::Expired),
    }
}

impl LeaseColumns {
    /// The row of a lease.
    pub(super) fn into_row(self) -> Row<Lease> {
        Row {
            revision: Version::from_stored(self.revision),
            state: Lease {
                version: Version::from_stored(self.version),
                status: status(self.status),
                owner_id: OwnerId::from_stored(self.owner_id),
                attempt_id: self.attempt_id,
                grant_id: self.grant_id,
                ttl: Ttl::from_stored(self.ttl_ms),
                acquired_at: Timestamp::from_micros(self.acquired_at),
                expires_at: Timestamp::from_micros(self.expires_at),
                recovered_from: self.recovered_from.map(Version::from_stored),
                metadata: self.metadata,
            },
        }
    }
}

impl RecordColumns {
    /// The row of a record.
    pub(super) fn into_row(self, claim: LeaseColumns) -> Row<Record> {
        let Row { revision, state: lease } = claim.into_row();
        let content = Content {
            text: self.content.unwrap_or_default().into(),
            body: self.body.map(Bytes::from),
        };
        let completion = self.completed_at.map(|at| Completion {
            at: Timestamp::from_micros(at),
            until: self.retained_until.map(Timestamp::from_micros),
            content,
        });
        let state = Record {
            lease,
            binding: self.binding.map(Binding::from_stored),
            correlation_id: self.correlation_id.map(CorrelationId::from_stored),
            completion,
        };
        Row { revision, state }
    }
}
