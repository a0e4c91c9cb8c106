-- +goose NO TRANSACTION
-- +goose Up
-- Who may send what: callers with their keys, templates with their versions, and who changed what.

CREATE TABLE IF NOT EXISTS t_source (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller, as messages name it',
  name             VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'for people to read',
  role             ENUM('sender','admin') NOT NULL DEFAULT 'sender' COMMENT 'sender: sees and sends its own; admin: sees all, and administers',
  enabled          TINYINT UNSIGNED  NOT NULL DEFAULT 1 COMMENT '0: its keys open nothing',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was registered (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when the row was last changed (UTC)',
  PRIMARY KEY (source_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='callers; while the table is empty, callers on this machine are the source default';

CREATE TABLE IF NOT EXISTS t_source_key (
  key_id           VARCHAR(16)       NOT NULL COMMENT 'the part of the key that may be shown',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that it names',
  key_hash         BINARY(32)        NOT NULL COMMENT 'SHA-256 of the key, which itself is kept nowhere',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  revoke_time      DATETIME(3)       NULL COMMENT 'when it was revoked (UTC); NULL: it is valid',
  PRIMARY KEY (key_id),
  KEY idx_source (source_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='keys of callers: at most two valid ones each, so that they can be changed without a gap';

CREATE TABLE IF NOT EXISTS t_msg_template (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that it belongs to',
  template_id      VARCHAR(64)       NOT NULL COMMENT 'its name in requests',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'the channel that this variant is for, numbered as in the queue tables',
  version          INT UNSIGNED      NOT NULL COMMENT 'from 1; what a version says never changes',
  name             VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'for people to read',
  rel_template_id  VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'its id on the platform of the provider',
  sign_name        VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'the signature that SMS providers ask for',
  subject          VARCHAR(998)      NOT NULL DEFAULT '' COMMENT 'the subject, with placeholders',
  content          MEDIUMTEXT        NOT NULL COMMENT 'the text, with placeholders such as {{username}}',
  html             MEDIUMTEXT        NOT NULL COMMENT 'the text as HTML, for e-mail; empty: none',
  category         ENUM('verification','notification','marketing') NULL COMMENT 'of messages that name none; NULL: notification',
  `sensitive`      TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '1: what the message said is blanked when it ends',
  status           TINYINT UNSIGNED  NOT NULL COMMENT '1 waiting for review, 2 normal, 3 rejected, 4 deleted',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the version was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when its status last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_version (source_id, template_id, channel, version)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='templates, a row for every version of every variant; messages keep the version they were accepted with';

CREATE TABLE IF NOT EXISTS t_audit (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was done (UTC)',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'who did it; command-line for the program itself',
  action           VARCHAR(64)       NOT NULL COMMENT 'what was done, such as template.update',
  object           VARCHAR(255)      NOT NULL COMMENT 'to what',
  detail           VARCHAR(1024)     NOT NULL DEFAULT '' COMMENT 'how; no content, no secrets',
  PRIMARY KEY (id),
  KEY idx_time (create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='who changed what, when: one row for every change by API or command, written with the change';
