// Drive nsqjs through the scenario of ../clients/scenario.py: node drive_nsqjs.js HOST PORT TOPIC
'use strict'

const readline = require('node:readline')
const {setTimeout: sleep} = require('node:timers/promises')
const nsq = require('nsqjs')

const [host, port, topic] = process.argv.slice(2)
const range = (prefix, count) => Array.from({length: count}, (_, i) => `${prefix}-${i}`)
const SINGLE = 'single'
const MULTI = range('multi', 10)
const DEFERRED = 'deferred'
const DEFER_MS = 600
const REQUEUED = MULTI[3]
const TOUCHED = MULTI[4]
const POISON = MULTI[5]
const POISON_ATTEMPTS = 3
const KEPT = range('kept', 20)
const AFTER = 'after'
const CHANNEL = 'work'
const MAX_IN_FLIGHT = 5
const TOUCH_AFTER_MS = 1200
const FINISH_TOUCHED_AFTER_MS = 2600

const held = new Set()
const finished = new Set()
let poisonAttempts = 0
let restarted = false
let keptAcknowledged = false

const report = (event, details = {}) =>
  console.log(JSON.stringify({event, at: performance.now() / 1000, ...details}))

readline.createInterface({input: process.stdin}).on('line', (line) => {
  if (line.trim() === 'restarted') restarted = true
})

// nsqjs does not reconnect a writer by itself.
const connectWriter = () =>
  new Promise((resolve) => {
    const writer = new nsq.Writer(host, Number(port))
    writer.on('ready', () => resolve(writer))
    writer.on('error', () => resolve(null))
    writer.on('closed', () => resolve(null))
    writer.connect()
  })

const publish = (writer, bodies, deferMs) =>
  new Promise((resolve, reject) => {
    const callback = (error) => (error ? reject(error) : resolve())
    if (deferMs === undefined) writer.publish(topic, bodies, callback)
    else writer.deferPublish(topic, [bodies], deferMs, callback) // it takes a list, of one
  })

const finish = (message, body) => {
  message.finish()
  finished.add(body)
  report('finished', {body})
}

// Only acknowledged messages must survive, so the broker is killed after it has answered.
const reportHolding = () => {
  if (keptAcknowledged && held.size >= MAX_IN_FLIGHT) report('holding', {bodies: [...held].sort()})
}

async function handle(message) {
  const body = message.body.toString()
  report('message', {body, attempts: message.attempts})
  if (body === REQUEUED && message.attempts === 1) {
    message.requeue(0, false)
  } else if (body === POISON && message.attempts <= POISON_ATTEMPTS) {
    poisonAttempts = message.attempts
    message.requeue(0, false)
  } else if (body === TOUCHED && message.attempts === 1) {
    await sleep(TOUCH_AFTER_MS)
    message.touch()
    await sleep(FINISH_TOUCHED_AFTER_MS - TOUCH_AFTER_MS)
    finish(message, body)
  } else if (KEPT.includes(body) && !restarted) {
    held.add(body)
    reportHolding()
  } else {
    finish(message, body)
  }
}

async function main() {
  let writer = await connectWriter()
  await publish(writer, SINGLE)
  report('published', {command: 'PUB', bodies: [SINGLE]})
  await publish(writer, MULTI)
  report('published', {command: 'MPUB', bodies: MULTI})
  await publish(writer, DEFERRED, DEFER_MS)
  report('published', {command: 'DPUB', bodies: [DEFERRED]})

  // Its check for lost connections runs every lookupdPollInterval, also without nsqlookupd.
  const reader = new nsq.Reader(topic, CHANNEL, {
    nsqdTCPAddresses: `${host}:${port}`,
    lookupdPollInterval: 1,
    maxInFlight: MAX_IN_FLIGHT,
    maxBackoffDuration: 1,
  })
  reader.on('message', handle)
  reader.on('error', () => {})
  reader.connect()
  const good = [SINGLE, DEFERRED, ...MULTI].filter((body) => body !== POISON)
  while (!good.every((body) => finished.has(body)) || poisonAttempts < POISON_ATTEMPTS) await sleep(20)
  report('worked')

  await publish(writer, KEPT)
  report('published', {command: 'MPUB', bodies: KEPT})
  keptAcknowledged = true
  reportHolding()
  while (!restarted) await sleep(20)
  while ((writer = await connectWriter()) === null) await sleep(50)
  await publish(writer, AFTER)
  report('published', {command: 'PUB', bodies: [AFTER]})
  while (![AFTER, ...KEPT].every((body) => finished.has(body))) await sleep(20)
  await sleep(200)
  report('done')
  process.exit(0)
}

main()
